"""Bamba (Mamba2 or attention, then an MLP) and Falcon-H1 (both at once, then an MLP).

Falcon-H1's multipliers are folded into weights, except where embeddings are looked up and at the
logits.
"""

from collections.abc import Sequence

from engine.layers.mixer import Part, ResidualBlock
from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.model_configs.model_config import ModelConfig
from engine.models.hybrid import HybridModel, Names, build_hybrid, norm_of


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are computed, not loaded."""
    return None if stored_name.endswith(("rotary_emb.inv_freq", "mup_vector")) else stored_name


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight`."""
    return build_hybrid(config, weights, _layer, Names(norm="model.final_layernorm"))


def _layer(config: ModelConfig, weights: Weights, mixers: Sequence[Part]) -> list[ResidualBlock]:
    mlp = GatedMLP(config.mlp, weights.below("feed_forward"), config.hidden_size)
    return [
        ResidualBlock(norm_of(config, weights, "input_layernorm"), mixers),
        ResidualBlock(norm_of(config, weights, "pre_ff_layernorm"), [mlp]),
    ]
