"""Qwen3: dense transformer with per-head q/k norms and full attention in every layer."""

import torch
from torch import Tensor

from engine.forward import (
    TORCH_DTYPES,
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    LayerCaches,
)
from engine.layers.attention_layer import AttentionLayer
from engine.layers.embedding import Embedding, output_head
from engine.layers.norm import load_norm
from engine.layers.qk_norm_attention import AttentionShape
from engine.layers.rotary import Rotary
from engine.layers.weights import Weights
from engine.model_configs.qwen3 import Qwen3Config
from engine.ops.scratch import Scratch


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are computed, not loaded."""
    return None if stored_name.endswith("rotary_emb.inv_freq") else stored_name


class Qwen3:
    """Built from `model.*` and `lm_head.weight`; KV cache group 0 holds all layers."""

    def __init__(self, config: Qwen3Config, weights: Weights) -> None:
        hidden = config.hidden_size
        table = weights.take("model.embed_tokens.weight", (config.vocab_size, hidden))
        self.embed = Embedding(table)
        shape, scratch, inner = _shape(config), Scratch(), config.intermediate_size
        self.layers = [
            AttentionLayer(
                shape, weights, f"model.layers.{layer}", intermediate=inner, scratch=scratch
            )
            for layer in range(config.num_layers)
        ]
        self.norm = load_norm(weights, "model.norm", hidden, eps=config.rms_norm_eps)
        self.lm_head = output_head(weights, self.embed, tied=config.tie_word_embeddings)
        self.rotary = Rotary(config.rope, TORCH_DTYPES[config.dtype], table.device)

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""
        x = self.embed(batch.token_ids)
        rotary = self.rotary.select(batch)
        index = batch.group_index[0]
        assert isinstance(index, AttentionIndex)
        for number, layer in enumerate(self.layers):
            cache = caches[0, number]
            assert isinstance(cache, AttentionCache)
            x = layer(x, rotary, cache, index=index, batch=batch)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        return self.lm_head(hidden_rows).to(torch.float32)


def _shape(config: Qwen3Config) -> AttentionShape:
    return AttentionShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        gated=False,
        norm_offset=0.0,
    )
