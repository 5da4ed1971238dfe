"""GraniteMoeHybrid: Mamba2 or attention, then a shared MLP and perhaps experts, in every layer.

Checkpoint names are the hub's; transformers 5 has others for the experts' tensors in memory.
"""

from collections.abc import Sequence

from engine.layers.mixer import Part, ResidualBlock
from engine.layers.mlp import Experts, GatedMLP
from engine.layers.weights import Weights
from engine.model_configs.model_config import ModelConfig
from engine.models.hybrid import HybridModel, build_hybrid, norm_of

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


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight`."""
    return build_hybrid(config, weights, _layer)


def _layer(config: ModelConfig, weights: Weights, mixers: Sequence[Part]) -> list[ResidualBlock]:
    hidden = config.hidden_size
    shared = weights.below("shared_mlp")
    parts: list[Part] = [
        GatedMLP(config.mlp, shared, hidden, gate_up=("input_linear",), down="output_linear")
    ]
    if config.experts is not None:
        parts.append(Experts(config.experts, weights.below("block_sparse_moe"), hidden))
    return [
        ResidualBlock(norm_of(config, weights, "input_layernorm"), mixers),
        ResidualBlock(norm_of(config, weights, "post_attention_layernorm"), parts),
    ]
