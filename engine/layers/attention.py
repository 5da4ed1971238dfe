"""Causal attention of a packed batch over paged K and V; knows nothing of projections or
positions.
"""

import torch
from torch import Tensor

from engine.layers.context import AttentionCache, AttentionIndex, ForwardBatch
from engine.ops.paged_attention import fast


class PagedAttention:
    """Writes the batch's K and V to their pages, then attends: decodes together, prefill
    segments one by one.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale

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
        outputs = []
        decodes = batch.num_decodes
        if decodes:
            lens = [context + 1 for context in batch.context_lens[:decodes]]
            tables = index.block_tables[:decodes]
            outputs.append(fast.decode(q[:decodes], cache, tables, lens=lens, scale=self.scale))
        start = decodes
        for segment in range(decodes, len(batch.query_lens)):
            end = start + batch.query_lens[segment]
            context = batch.context_lens[segment]
            row = index.block_tables[segment]
            part = fast.prefill(q[start:end], cache, row, context=context, scale=self.scale)
            outputs.append(part)
            start = end
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.reshape(q.shape[0], -1)
