"""Qwen3.5 dense text: gated delta net layers with a full-attention layer now and then.

Also reads the text part of vision-language checkpoints; vision towers and `mtp.*` heads are
skipped.
"""

import torch
from torch import Tensor

from engine.forward import (
    TORCH_DTYPES,
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    LayerCaches,
    StateCache,
    StateIndex,
)
from engine.layers.attention_layer import AttentionLayer
from engine.layers.embedding import Embedding, output_head
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm, load_norm
from engine.layers.qk_norm_attention import AttentionShape
from engine.layers.rotary import Rotary
from engine.layers.weights import Weights
from engine.model_configs.qwen3_5 import LINEAR, Qwen3_5Config
from engine.ops.scratch import Scratch

SKIPPED = ("mtp.", "model.visual.", "visual.")
WRAPPED = "model.language_model."
# Block norms (not the gated norm) store their weight minus one.
NORM_OFFSET = 1.0


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are skipped by design."""
    if stored_name.startswith(SKIPPED):
        return None
    if stored_name.startswith(WRAPPED):
        return "model." + stored_name.removeprefix(WRAPPED)
    return stored_name


class Qwen3_5:
    """Built from `model.*` and `lm_head.weight` (names after `rename`)."""

    def __init__(self, config: Qwen3_5Config, weights: Weights) -> None:
        hidden = config.hidden_size
        table = weights.take("model.embed_tokens.weight", (config.vocab_size, hidden))
        self.embed = Embedding(table)
        scratch = Scratch()
        self.layers = [
            _LinearLayer(config, weights, layer, scratch=scratch)
            if kind == LINEAR
            else _full_layer(config, weights, layer, scratch=scratch)
            for layer, kind in enumerate(config.layer_types)
        ]
        self.groups = {
            layer: group for group, members in enumerate(config.groups) for layer in members.layers
        }
        self.norm = _norm(config, weights, "model.norm")
        self.lm_head = output_head(weights, self.embed, tied=config.tie_word_embeddings)
        self.rotary = Rotary(config.rope, TORCH_DTYPES[config.dtype], table.device)

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""
        x = self.embed(batch.token_ids)
        rotary = self.rotary.select(batch)
        for number, layer in enumerate(self.layers):
            group = self.groups[number]
            cache = caches[group, number]
            index = batch.group_index[group]
            if isinstance(layer, _LinearLayer):
                assert isinstance(cache, StateCache)
                assert isinstance(index, StateIndex)
                x = layer(x, cache, index, batch)
            else:
                assert isinstance(cache, AttentionCache)
                assert isinstance(index, AttentionIndex)
                x = layer(x, rotary, cache, index=index, batch=batch)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        return self.lm_head(hidden_rows).to(torch.float32)


class _LinearLayer:
    def __init__(
        self, config: Qwen3_5Config, weights: Weights, layer: int, *, scratch: Scratch
    ) -> None:
        prefix = f"model.layers.{layer}"
        self.norm = _norm(config, weights, f"{prefix}.input_layernorm")
        self.mixer = GatedDeltaNet(
            config.delta_net, weights, f"{prefix}.linear_attn", scratch=scratch
        )
        self.mlp_norm = _norm(config, weights, f"{prefix}.post_attention_layernorm")
        self.mlp = GatedMLP(weights, f"{prefix}.mlp", config.hidden_size, config.intermediate_size)

    def __call__(
        self, x: Tensor, cache: StateCache, index: StateIndex, batch: ForwardBatch
    ) -> Tensor:
        x = self.mixer(self.norm(x), x, cache, index=index, batch=batch)
        return self.mlp(self.mlp_norm(x), x)


def _full_layer(
    config: Qwen3_5Config, weights: Weights, layer: int, *, scratch: Scratch
) -> AttentionLayer:
    shape = AttentionShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        gated=True,
        norm_offset=NORM_OFFSET,
    )
    prefix, inner = f"model.layers.{layer}", config.intermediate_size
    return AttentionLayer(shape, weights, prefix, intermediate=inner, scratch=scratch)


def _norm(config: Qwen3_5Config, weights: Weights, name: str) -> RMSNorm:
    size, eps = config.hidden_size, config.rms_norm_eps
    return load_norm(weights, name, size, eps=eps, offset=NORM_OFFSET)
