"""Attention over pages, one sequence and one head at a time in float32: the truth for `fast.py`.

Pages are [rows, num_kv_heads, block_size, head_dim]; a sequence is a row of page numbers and a
length. With a `window`, the token at position p reads positions p - window + 1 to p only; pages
before that may be any valid row.
"""

import torch
from torch import Tensor

from engine.forward import AttentionCache


def write_tokens(k: Tensor, v: Tensor | None, cache: AttentionCache, slot_mapping: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `slot_mapping` int64 [T * Hkv] (heads fastest)."""
    for row, slot in enumerate(slot_mapping.tolist()):
        token, head = divmod(row, k.shape[1])
        cache.k_tokens[slot] = k[token, head]
        if v is not None:
            cache.v_tokens[slot] = v[token, head]


def decode(
    q: Tensor,
    cache: AttentionCache,
    block_tables: Tensor,
    *,
    lens: list[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """One token per sequence, q [S, H, D] -> [S, H, D]; lens[i] counts it, K and V are written."""
    rows = [
        prefill(one, cache, row, context=length - 1, scale=scale, window=window)
        for one, row, length in zip(q.unsqueeze(1), block_tables, lens, strict=True)
    ]
    return torch.cat(rows)


def prefill(
    q: Tensor,
    cache: AttentionCache,
    block_row: Tensor,
    *,
    context: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Positions context .. context + n - 1 of a sequence, all written: q [n, H, D] -> the same."""
    length = context + q.shape[0]
    k = _gather(cache.k_pages, block_row, length)
    v = _gather(cache.v_pages, block_row, length)
    group = q.shape[1] // k.shape[0]
    out = torch.empty_like(q)
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            end = context + t + 1
            seen = slice(0 if window is None else max(0, end - window), end)
            scores = k[head // group, seen] @ q[t, head].float() * scale
            out[t, head] = torch.softmax(scores, 0) @ v[head // group, seen]
    return out


def _gather(pages: Tensor, block_row: Tensor, length: int) -> Tensor:
    """[Hkv, length, D] float32."""
    tokens = torch.cat([pages[row] for row in block_row.tolist()], dim=1)
    return tokens[:, :length].float()
