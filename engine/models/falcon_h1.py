"""Falcon-H1: attention and Mamba2 add to the same residual in every layer, then an MLP.

Its multipliers are folded into weights, except where embeddings are looked up and at the logits.
"""

from functools import partial

from engine.layers.hybrid_layer import HybridLayer
from engine.layers.mixers import Mixer
from engine.layers.mlp import GatedMLP, MLPStyle
from engine.layers.norm import load_norm
from engine.layers.weights import Weights
from engine.model_configs.falcon_h1 import FalconH1Config
from engine.models.hybrid import HybridModel, build_hybrid


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are computed, not loaded."""
    return None if stored_name.endswith(("rotary_emb.inv_freq", "mup_vector")) else stored_name


def build(config: FalconH1Config, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight`."""
    layer = partial(_layer, config, weights)
    return build_hybrid(config, weights, layer, last_norm="model.final_layernorm")


def _layer(
    config: FalconH1Config, weights: Weights, index: int, mixers: list[Mixer]
) -> HybridLayer:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    norm = partial(load_norm, weights, size=hidden, eps=config.rms_norm_eps)
    gate, output = config.mlp_scales
    style = MLPStyle(bias=config.mlp_bias, gate_scale=gate, output_scale=output)
    return HybridLayer(
        norm=norm(name=f"{prefix}.input_layernorm"),
        mixers=mixers,
        mlp_norm=norm(name=f"{prefix}.pre_ff_layernorm"),
        blocks=[
            GatedMLP(
                weights, f"{prefix}.feed_forward", hidden, config.intermediate_size, style=style
            )
        ],
    )
