"""Attention over pages: batched products for decodes, torch's fused attention for prefill segments.

Signatures as in `naive.py`, and `scratch`. Head-major pages gather by whole (page, head) rows
straight into a batched product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import AttentionCache
from engine.ops.scratch import Scratch

# Beyond this ratio of padded to real tokens, decodes of uneven lengths are done one by one.
MAX_PADDING = 4


def write_tokens(k: Tensor, v: Tensor, cache: AttentionCache, slot_mapping: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `slot_mapping` int64 [T * Hkv] (heads fastest)."""
    cache.k_tokens.index_copy_(0, slot_mapping, k.reshape(-1, k.shape[-1]))
    cache.v_tokens.index_copy_(0, slot_mapping, v.reshape(-1, v.shape[-1]))


def decode(
    q: Tensor,
    cache: AttentionCache,
    block_tables: Tensor,
    *,
    lens: list[int],
    scale: float,
    scratch: Scratch,
) -> Tensor:
    """One token per sequence, q [S, H, D] -> [S, H, D]; lens[i] counts it, K and V are written."""
    longest = max(lens)
    if longest * len(lens) > MAX_PADDING * sum(lens):
        parts = (
            decode(one, cache, block_tables[i : i + 1], lens=[n], scale=scale, scratch=scratch)
            for i, (one, n) in enumerate(zip(q.unsqueeze(1), lens, strict=True))
        )
        return torch.cat(list(parts))
    k, v = _gather(cache, block_tables, longest, scratch=scratch)
    size, heads, dim = q.shape
    grouped = (q * scale).view(k.shape[0], -1, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2))
    if min(lens) < longest:
        ends = torch.tensor(lens, device=q.device).view(-1, 1, 1)
        beyond = torch.arange(longest, device=q.device) >= ends
        scores.view(size, heads, longest).masked_fill_(beyond, float("-inf"))
        if q.dtype != torch.float32:
            _clear(v, beyond)
    weights = torch.softmax(scores.float(), -1).to(q.dtype)
    return torch.bmm(weights, v).view(size, heads, dim)


def prefill(
    q: Tensor,
    cache: AttentionCache,
    block_row: Tensor,
    *,
    context: int,
    scale: float,
    scratch: Scratch,
) -> Tensor:
    """Positions context .. context + n - 1 of a sequence, all written: q [n, H, D] -> the same."""
    n = q.shape[0]
    k, v = _gather(cache, block_row.unsqueeze(0), context + n, scratch=scratch)
    mask = None
    if context and n > 1:
        mask = torch.ones(n, context + n, dtype=torch.bool, device=q.device).tril_(context)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=not context,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out[0].transpose(0, 1)


def _gather(
    cache: AttentionCache, block_tables: Tensor, length: int, *, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """K and V as [S * Hkv, length, D]; without a copy when one page holds the only sequence."""
    heads, block_size, dim = cache.k_pages.shape[1:]
    blocks = -(-length // block_size)
    tables = block_tables[:, :blocks]
    if tables.numel() == 1:
        row = int(tables)
        return cache.k_pages[row, :, :length], cache.v_pages[row, :, :length]
    offsets = torch.arange(heads, device=tables.device).view(1, heads, 1)
    rows = torch.add(offsets, tables.unsqueeze(1), alpha=heads).view(-1)
    shape = (rows.shape[0], block_size * dim)
    k = scratch.take("k", shape, cache.k_pages)
    v = scratch.take("v", shape, cache.v_pages)
    torch.index_select(cache.k_pages.view(-1, shape[1]), 0, rows, out=k)
    torch.index_select(cache.v_pages.view(-1, shape[1]), 0, rows, out=v)
    k, v = (x.view(-1, blocks * block_size, dim) for x in (k, v))
    return k[:, :length], v[:, :length]


def _clear(v: Tensor, beyond: Tensor) -> None:
    """Zeroes the gathered v [S * Hkv, L, D] where `beyond` [S, 1, L].

    A float32 state that was left there can read as NaN in 16 bits, and zero times NaN is NaN.
    """
    rows = v.view(beyond.shape[0], -1, *v.shape[1:])
    rows.masked_fill_(beyond.unsqueeze(-1), 0)
