"""Qwen3.5 dense text: gated delta net layers with a full-attention layer now and then.

Also reads the text part of vision-language checkpoints; vision towers and `mtp.*` heads are
skipped.
"""

from engine.layers.weights import Weights
from engine.model_configs.model_config import ModelConfig
from engine.models.hybrid import HybridModel, build_hybrid
from engine.models.qwen3 import qwen_layer

SKIPPED = ("mtp.", "model.visual.", "visual.")
WRAPPED = "model.language_model."


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are skipped by design."""
    if stored_name.startswith(SKIPPED):
        return None
    if stored_name.startswith(WRAPPED):
        return "model." + stored_name.removeprefix(WRAPPED)
    return stored_name


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight` (names after `rename`)."""
    return build_hybrid(config, weights, qwen_layer)
