"""Causal attention of a packed batch over paged K and V; knows no projections or positions."""

import torch
from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex, ForwardBatch
from engine.ops.paged_attention import fast
from engine.ops.scratch import Scratch


class PagedAttention:
    """Writes the batch's K and V, then attends: decodes together, prefill segments one by one.

    Layers that run one after another may share `scratch`; it grows to one layer's gathered K and V.
    `window`: tokens read themselves and the `window` - 1 tokens before them (None: all of them).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        scratch: Scratch | None = None,
        window: int | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.scratch = scratch or Scratch()
        self.window = window

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: AttentionCache,
        index: AttentionIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D] -> [T, H * D]."""
        fast.write_tokens(k, v, cache, index.slot_mapping)
        decodes = batch.num_decodes
        parts = [self._decode(q[:decodes], cache, index, batch=batch)] if decodes else []
        start = decodes
        for segment in range(decodes, len(batch.query_lens)):
            end = start + batch.query_lens[segment]
            row = index.block_tables[segment]
            context = batch.context_lens[segment]
            parts.append(self._prefill(q[start:end], cache, row, context=context))
            start = end
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.reshape(q.shape[0], -1)

    def _decode(
        self, q: Tensor, cache: AttentionCache, index: AttentionIndex, *, batch: ForwardBatch
    ) -> Tensor:
        return fast.decode(
            q,
            cache,
            index.block_tables[: q.shape[0]],
            lens=[context + 1 for context in batch.context_lens[: q.shape[0]]],
            scale=self.scale,
            scratch=self.scratch,
            window=self.window,
        )

    def _prefill(self, q: Tensor, cache: AttentionCache, row: Tensor, *, context: int) -> Tensor:
        return fast.prefill(
            q,
            cache,
            row,
            context=context,
            scale=self.scale,
            scratch=self.scratch,
            window=self.window,
        )
