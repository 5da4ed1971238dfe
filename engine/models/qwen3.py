"""Qwen3: dense transformer with per-head q/k norms and full attention in every layer."""

from collections.abc import Sequence

from engine.layers.mixer import Part, ResidualBlock
from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.model_configs.model_config import ModelConfig
from engine.models.hybrid import HybridModel, build_hybrid, norm_of


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are computed, not loaded."""
    return None if stored_name.endswith("rotary_emb.inv_freq") else stored_name


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight`."""
    return build_hybrid(config, weights, qwen_layer)


def qwen_layer(
    config: ModelConfig, weights: Weights, mixers: Sequence[Part]
) -> list[ResidualBlock]:
    """The mixers, then an MLP, each on its own norm."""
    mlp = GatedMLP(config.mlp, weights.below("mlp"), config.hidden_size)
    return [
        ResidualBlock(norm_of(config, weights, "input_layernorm"), mixers),
        ResidualBlock(norm_of(config, weights, "post_attention_layernorm"), [mlp]),
    ]
