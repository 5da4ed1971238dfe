"""Attention with norms of q and k: one input product, norms, rotary, paged attention, gate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex, ForwardBatch
from engine.layers.attention import PagedAttention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import rotate_
from engine.layers.weights import Weights
from engine.ops.scratch import Scratch


@dataclass(slots=True, frozen=True)
class AttentionShape:
    """Sizes of one block.

    `gated`: q_proj also gives a sigmoid gate; `norm_offset` is added to q/k norm weights. `scale`
    of the scores is head_dim^-0.5 unless given; `window` as in `PagedAttention`.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    gated: bool
    norm_offset: float
    scale: float | None = None
    window: int | None = None


class QKNormAttention:
    """Tensors `<prefix>.{q_proj, k_proj, v_proj, o_proj, q_norm, k_norm}.weight`."""

    def __init__(
        self, shape: AttentionShape, weights: Weights, prefix: str, *, scratch: Scratch
    ) -> None:
        self.shape = shape
        self.in_proj = _in_proj(shape, weights, prefix)
        self.norm = RMSNorm(_norm_weight(shape, weights, prefix), shape.eps)
        width = shape.heads * shape.head_dim
        self.o_proj = Linear(weights.take(f"{prefix}.o_proj.weight", (shape.hidden, width)))
        self.attention = PagedAttention(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.head_dim**-0.5 if shape.scale is None else shape.scale,
            scratch=scratch,
            window=shape.window,
        )
        kv_width = shape.kv_heads * shape.head_dim
        self._splits = [width + kv_width, kv_width, width if shape.gated else 0]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: Tensor,
        *,
        cache: AttentionCache,
        index: AttentionIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        """residual + attention(x), both [T, hidden]; `rotary` is what `Rotary.select` gave."""
        heads = self._attend(x, rotary, cache, index=index, batch=batch)
        return self.o_proj.add_to(residual, heads)

    def alone(
        self,
        x: Tensor,
        rotary: Tensor,
        cache: AttentionCache,
        *,
        index: AttentionIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        """attention(x), [T, hidden]."""
        return self.o_proj(self._attend(x, rotary, cache, index=index, batch=batch))

    def _attend(
        self,
        x: Tensor,
        rotary: Tensor,
        cache: AttentionCache,
        *,
        index: AttentionIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        shape = self.shape
        qk, v, gate = self.in_proj(x).split_with_sizes(self._splits, dim=-1)
        qk = self.norm(qk.view(x.shape[0], -1, shape.head_dim))
        rotate_(qk, rotary)
        q, k = qk.split_with_sizes([shape.heads, shape.kv_heads], dim=1)
        v = v.view(x.shape[0], shape.kv_heads, shape.head_dim)
        out = self.attention(q, k, v, cache, index, batch)
        return out * gate.sigmoid() if shape.gated else out


def _in_proj(shape: AttentionShape, weights: Weights, prefix: str) -> Linear:
    """One product for q, k | v | gate; a gated q_proj is stored as (q, gate) pairs per head."""
    dim = shape.head_dim
    parts = 2 if shape.gated else 1
    stored = weights.take(f"{prefix}.q_proj.weight", (shape.heads * parts * dim, shape.hidden))
    q, *gate = stored.view(shape.heads, parts, dim, shape.hidden).unbind(1)
    kv_rows = (shape.kv_heads * dim, shape.hidden)
    k, v = (weights.take(f"{prefix}.{name}_proj.weight", kv_rows) for name in ("k", "v"))
    return Linear.merged([part.reshape(-1, shape.hidden) for part in (q, k, v, *gate)])


def _norm_weight(shape: AttentionShape, weights: Weights, prefix: str) -> Tensor:
    """[heads + kv_heads, head_dim]: q's norm weight for each query head, k's for each key head."""
    q, k = (
        weights.take(f"{prefix}.{name}_norm.weight", (shape.head_dim,)).float() + shape.norm_offset
        for name in ("q", "k")
    )
    return torch.cat([q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)])
