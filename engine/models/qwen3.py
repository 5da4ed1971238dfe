"""Qwen3: dense transformer with per-head q/k norms and full attention in every layer."""

import torch
from torch import Tensor

from engine.layers.context import (
    TORCH_DTYPES,
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    LayerCache,
)
from engine.layers.embedding import Embedding, output_head
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.qk_norm_attention import AttentionShape, QKNormAttention
from engine.layers.rotary import Rotary
from engine.models.configs.qwen3 import Qwen3Config
from engine.models.weights import Weights
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
        scratch = Scratch()
        self.layers = [
            _Layer(config, weights, layer, scratch=scratch) for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(weights.take("model.norm.weight", (hidden,)), config.rms_norm_eps)
        self.lm_head = output_head(weights, self.embed, tied=config.tie_word_embeddings)
        self.rotary = Rotary(config.rope, TORCH_DTYPES[config.dtype], table.device)

    def forward(self, batch: ForwardBatch, caches: dict[tuple[int, int], LayerCache]) -> Tensor:
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


class _Layer:
    def __init__(
        self, config: Qwen3Config, weights: Weights, layer: int, *, scratch: Scratch
    ) -> None:
        prefix = f"model.layers.{layer}"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        shape = AttentionShape(
            hidden=hidden,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=eps,
            gated=False,
            norm_offset=0.0,
        )
        self.norm = RMSNorm(weights.take(f"{prefix}.input_layernorm.weight", (hidden,)), eps)
        self.attention = QKNormAttention(shape, weights, f"{prefix}.self_attn", scratch=scratch)
        post = weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        self.mlp_norm = RMSNorm(post, eps)
        self.mlp = GatedMLP(weights, f"{prefix}.mlp", hidden, config.intermediate_size)

    def __call__(
        self,
        x: Tensor,
        rotary: Tensor,
        cache: AttentionCache,
        *,
        index: AttentionIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        x = self.attention(self.norm(x), x, rotary, cache=cache, index=index, batch=batch)
        return self.mlp(self.mlp_norm(x), x)
