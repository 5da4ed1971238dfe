"""Dense Qwen text models: the mixers that the config names, then an MLP, in every layer.

Also reads the text part of vision-language checkpoints. Vision towers, `mtp.*` heads and rotary
frequencies, which are computed, are skipped.
"""

from collections.abc import Sequence

from engine.layers.mixer import Part, ResidualBlock
from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.model_configs.model_config import ModelConfig
from engine.models.hybrid import HybridModel, build_hybrid, norm_of

SKIPPED = ("mtp.", "model.visual.", "visual.")
WRAPPED = "model.language_model."


def rename(stored_name: str) -> str | None:
    """The name by which `build` asks for a tensor; None: it is skipped by design."""
    if stored_name.startswith(SKIPPED) or stored_name.endswith("rotary_emb.inv_freq"):
        return None
    if stored_name.startswith(WRAPPED):
        return "model." + stored_name.removeprefix(WRAPPED)
    return stored_name


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight` (names after `rename`)."""
    return build_hybrid(config, weights, _layer)


def _layer(config: ModelConfig, weights: Weights, mixers: Sequence[Part]) -> list[ResidualBlock]:
    mlp = GatedMLP(config.mlp, weights.below("mlp"), config.hidden_size)
    return [
        ResidualBlock(norm_of(config, weights, "input_layernorm"), mixers),
        ResidualBlock(norm_of(config, weights, "post_attention_layernorm"), [mlp]),
    ]
