"""Gemma 3 text: sliding-window layers with a full-attention layer now and then; norms all around.

Also reads the text part of vision-language checkpoints; vision tower and projector are skipped.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from engine.forward import TORCH_DTYPES
from engine.layers.mixer import Part, ResidualBlock
from engine.layers.mlp import GatedMLP
from engine.layers.weights import Weights
from engine.model_configs.model_config import ModelConfig
from engine.models.hybrid import HybridModel, build_hybrid, norm_of

SKIPPED = ("vision_tower.", "multi_modal_projector.")


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are skipped by design.

    Wrapped models are stored as `language_model.model.*` on the hub, and as
    `model.language_model.*` by some versions of transformers.
    """
    if stored_name.removeprefix("model.").startswith(SKIPPED):
        return None
    if stored_name.startswith("model.language_model."):
        return "model." + stored_name.removeprefix("model.language_model.")
    return stored_name.removeprefix("language_model.")


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """From `model.*` and `lm_head.weight` (names after `rename`)."""
    # transformers rounds this factor to the compute dtype, and models were trained so.
    scale = torch.tensor(config.hidden_size**0.5, dtype=TORCH_DTYPES[config.dtype])
    return build_hybrid(replace(config, embedding_scale=float(scale)), weights, _layer)


def _layer(config: ModelConfig, weights: Weights, mixers: Sequence[Part]) -> list[ResidualBlock]:
    """Attention and MLP, each normed before and after."""
    norm = partial(norm_of, config, weights)
    gelu = partial(F.gelu, approximate="tanh")
    mlp = GatedMLP(config.mlp, weights.below("mlp"), config.hidden_size, activation=gelu)
    before, after = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
    return [
        ResidualBlock(norm("input_layernorm"), mixers, norm("post_attention_layernorm")),
        ResidualBlock(before, [mlp], after),
    ]
