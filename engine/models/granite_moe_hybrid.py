"""GraniteMoeHybrid: Mamba2 or attention, then a shared MLP and perhaps experts, in every layer.

Checkpoint names are the hub's; transformers 5 has others for the experts' tensors in memory.
"""

from functools import partial

from engine.layers.experts import Experts
from engine.layers.hybrid_layer import FeedForward, HybridLayer
from engine.layers.mixers import Mixer
from engine.layers.mlp import GatedMLP, MLPStyle
from engine.layers.norm import load_norm
from engine.layers.weights import Weights
from engine.model_configs.granite_moe_hybrid import GraniteMoeHybridConfig
from engine.models.hybrid import HybridModel, build_hybrid

NEW_NAMES = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are computed, not loaded."""
    if stored_name.endswith("rotary_emb.inv_freq"):
        return None
    for new, name in NEW_NAMES.items():
        if stored_name.endswith(new):
            return stored_name.removesuffix(new) + name
    return stored_name


def build(config: GraniteMoeHybridConfig, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight`."""
    return build_hybrid(config, weights, partial(_layer, config, weights), last_norm="model.norm")


def _layer(
    config: GraniteMoeHybridConfig, weights: Weights, index: int, mixers: list[Mixer]
) -> HybridLayer:
    prefix = f"model.layers.{index}"
    norm = partial(load_norm, weights, size=config.hidden_size, eps=config.rms_norm_eps)
    return HybridLayer(
        norm=norm(name=f"{prefix}.input_layernorm"),
        mixers=mixers,
        mlp_norm=norm(name=f"{prefix}.post_attention_layernorm"),
        blocks=_blocks(config, weights, prefix),
    )


def _blocks(config: GraniteMoeHybridConfig, weights: Weights, prefix: str) -> list[FeedForward]:
    hidden, scale, experts = config.hidden_size, config.residual_scale, config.experts
    style = MLPStyle(output_scale=scale, gate_up=("input_linear",), down="output_linear")
    shared = GatedMLP(
        weights, f"{prefix}.shared_mlp", hidden, config.intermediate_size, style=style
    )
    if experts is None:
        return [shared]
    prefix = f"{prefix}.block_sparse_moe"
    return [shared, Experts(experts, weights, prefix, hidden=hidden, output_scale=scale)]
