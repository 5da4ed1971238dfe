"""Attention over pages: batched products for decodes, torch's fused attention for prefill segments.

The parts have the signatures of `naive.py`, and `scratch`. Head-major pages gather by whole (page,
head) rows straight into a batched product. With a `window`, blocks before it are not read.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex
from engine.ops.scratch import Scratch

# Beyond this ratio of padded to real tokens, decodes of uneven lengths are done one by one.
MAX_PADDING = 4
# Prefill segments longer than their window are done in tiles of the window, but not of less.
MIN_TILE = 128


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cache: AttentionCache,
    index: AttentionIndex,
    *,
    scale: float,
    window: int | None,
    scratch: Scratch,
) -> Tensor:
    """See `backend.PagedAttention`: decodes together, prefill segments one by one.

    `scratch` grows to one layer's gathered K and V.
    """
    tables, lens = index.block_tables, index.lens
    write_tokens(k, v, cache, index.slot_mapping)
    decode_all = partial(decode, scale=scale, scratch=scratch, window=window)
    prefill_one = partial(prefill, scale=scale, scratch=scratch, window=window)
    start = decodes = lens.num_decodes
    parts = []
    if decodes:
        totals = [context + 1 for context in lens.context_lens[:decodes]]
        parts.append(decode_all(q[:decodes], cache, tables[:decodes], lens=totals))
    for segment in range(decodes, len(lens.query_lens)):
        end, context = start + lens.query_lens[segment], lens.context_lens[segment]
        parts.append(prefill_one(q[start:end], cache, tables[segment], context=context))
        start = end
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.reshape(q.shape[0], -1)


def write_tokens(k: Tensor, v: Tensor | None, cache: AttentionCache, slot_mapping: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `slot_mapping` int64 [T * Hkv] (heads fastest)."""
    cache.k_tokens.index_copy_(0, slot_mapping, k.reshape(-1, k.shape[-1]))
    if v is not None:
        cache.v_tokens.index_copy_(0, slot_mapping, v.reshape(-1, v.shape[-1]))


def decode(
    q: Tensor,
    cache: AttentionCache,
    block_tables: Tensor,
    *,
    lens: list[int],
    scale: float,
    scratch: Scratch,
    window: int | None = None,
) -> Tensor:
    """One token per sequence, q [S, H, D] -> [S, H, D]; lens[i] counts it, K and V are written."""
    starts = [0] * len(lens)
    if window is not None and max(lens) > window:
        block_size = cache.k_pages.shape[2]
        block_tables, lens, starts = _recent(block_tables, lens, window, block_size=block_size)
    longest = max(lens)
    # A batch is padded to its longest sequence: one long context among short ones is mostly pads.
    if longest * len(lens) > MAX_PADDING * sum(lens):
        parts = (
            decode(
                one, cache, row, lens=[length], scale=scale, scratch=scratch, window=length - start
            )
            for one, row, length, start in zip(
                q.unsqueeze(1), block_tables.unsqueeze(1), lens, starts, strict=True
            )
        )
        return torch.cat(list(parts))
    k, v = _gather(cache, block_tables, longest, scratch=scratch)
    size, heads, dim = q.shape
    grouped = (q * scale).view(k.shape[0], -1, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2)).view(size, heads, longest)
    beyond = _mask(scores, lens, starts=starts)
    weights = torch.softmax(scores.float(), -1).to(q.dtype).view(k.shape[0], -1, longest)
    return _weigh(weights, v, beyond).view(size, heads, dim)


def prefill(
    q: Tensor,
    cache: AttentionCache,
    block_row: Tensor,
    *,
    context: int,
    scale: float,
    scratch: Scratch,
    window: int | None = None,
) -> Tensor:
    """Positions context .. context + n - 1 of a sequence, all written: q [n, H, D] -> the same."""
    n = q.shape[0]
    tile = n if window is None else max(window, MIN_TILE)
    if n > tile:
        # Each tile reads its window instead of all tokens; so do masks, which else are n x n.
        parts = (
            prefill(
                q[start : start + tile],
                cache,
                block_row,
                context=context + start,
                scale=scale,
                scratch=scratch,
                window=window,
            )
            for start in range(0, n, tile)
        )
        return torch.cat(list(parts))
    first = 0 if window is None else max(0, context - window + 1)
    skipped = first // cache.k_pages.shape[2]
    before = skipped * cache.k_pages.shape[2]
    pages = block_row[skipped:].unsqueeze(0)
    k, v = _gather(cache, pages, context + n - before, scratch=scratch)
    # Whole blocks were gathered:  | before .. first: not read | first .. context + n |
    k, v = k[:, first - before :], v[:, first - before :]
    mask = _causal_mask(n, k.shape[1], window, device=q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and n > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out[0].transpose(0, 1)


def _causal_mask(n: int, length: int, window: int | None, *, device: torch.device) -> Tensor | None:
    """The positions that the last n of `length` may read: bool [n, length].

    None where that is all (one query) or plainly causal (n = length), which torch knows itself.
    """
    narrow = window is not None and length > window
    if not narrow and n in (1, length):
        return None
    context = length - n
    mask = torch.ones(n, length, dtype=torch.bool, device=device).tril_(context)
    return mask.triu_(context - window + 1) if narrow and window is not None else mask


def _recent(
    block_tables: Tensor, lens: list[int], window: int, *, block_size: int
) -> tuple[Tensor, list[int], list[int]]:
    """Tables without the blocks before the window, lengths in them, starts of the window in them.

    Nothing of those blocks is read; their entries may be any valid row.

        blocks   | null | null | b2 . . . | b3 . . . | b4 .      length
        window                      [. . . . . . . . . .]
        tables                 | b2       | b3       | b4        length - 2 blocks
                                    ^ start
    """
    firsts = [max(0, length - window) for length in lens]
    skipped = [first // block_size for first in firsts]
    lens = [length - skip * block_size for length, skip in zip(lens, skipped, strict=True)]
    starts = [first - skip * block_size for first, skip in zip(firsts, skipped, strict=True)]
    width = -(-max(lens) // block_size)
    columns = torch.arange(width, device=block_tables.device)
    columns = columns + torch.tensor(skipped, device=block_tables.device).unsqueeze(1)
    # Beyond a short sequence's end: any entry of its own, masked like all padding.
    return block_tables.gather(1, columns.clamp_(max=block_tables.shape[1] - 1)), lens, starts


def _mask(scores: Tensor, lens: list[int], *, starts: list[int]) -> Tensor | None:
    """Hides positions outside starts[i] .. lens[i] - 1 in scores [S, H, L].

    Returns which lie beyond their sequence: bool [S, 1, L], or None where none does.
    """
    positions = torch.arange(scores.shape[2], device=scores.device)
    if any(starts):
        begins = torch.tensor(starts, device=scores.device).view(-1, 1, 1)
        scores.masked_fill_(positions < begins, float("-inf"))
    if min(lens) == scores.shape[2]:
        return None
    beyond = positions >= torch.tensor(lens, device=scores.device).view(-1, 1, 1)
    scores.masked_fill_(beyond, float("-inf"))
    return beyond


def _weigh(weights: Tensor, v: Tensor, beyond: Tensor | None) -> Tensor:
    """weights [S * Hkv, H / Hkv, L] times the gathered v [S * Hkv, L, D].

    Zero times NaN is NaN, so v must have none where `beyond` hides it. A float32 state that was
    left there can well read as NaN in 16 bits; in 32 bits only a request that failed leaves NaN,
    and looking for it in the product is cheaper than clearing.
    """
    # On a device the look would wait for everything that is queued there.
    may_look = v.dtype == torch.float32 and v.device.type == "cpu"
    if beyond is not None and not may_look:
        _clear(v, beyond)
    product = torch.bmm(weights, v)
    if beyond is not None and may_look and product.sum().isnan():
        _clear(v, beyond)
        product = torch.bmm(weights, v)
    return product


def _gather(
    cache: AttentionCache, block_tables: Tensor, length: int, *, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """K and V as [S * Hkv, length, D]; without a copy when one page holds the only sequence."""
    heads, block_size, dim = cache.k_pages.shape[1:]
    blocks = -(-length // block_size)
    tables = block_tables[:, :blocks]
    if tables.numel() == 1 and tables.device.type == "cpu":
        row = int(tables)
        return cache.k_pages[row, :, :length], cache.v_pages[row, :, :length]
    offsets = torch.arange(heads, device=tables.device).view(1, heads, 1)
    # Rows are ordered sequence, head, block, so that one sequence's head is one matrix [length, D].
    rows = torch.add(offsets, tables.unsqueeze(1), alpha=heads).view(-1)
    shape = (rows.shape[0], block_size * dim)
    k = scratch.take("k", shape, cache.k_pages)
    torch.index_select(cache.k_pages.view(-1, shape[1]), 0, rows, out=k)
    v = k
    if cache.v_pages is not cache.k_pages:
        v = scratch.take("v", shape, cache.v_pages)
        torch.index_select(cache.v_pages.view(-1, shape[1]), 0, rows, out=v)
    k, v = (x.view(-1, blocks * block_size, dim)[:, :length] for x in (k, v))
    return k, v


def _clear(v: Tensor, beyond: Tensor) -> None:
    """Zeroes the gathered v [S * Hkv, L, D] where `beyond` [S, 1, L]."""
    rows = v.view(beyond.shape[0], -1, *v.shape[1:])
    rows.masked_fill_(beyond.unsqueeze(-1), 0)
