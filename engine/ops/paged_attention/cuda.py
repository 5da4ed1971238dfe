"""Attention over pages on a CUDA device: Triton kernels for decodes, torch's own for segments.

A decode's positions are cut into splits, so that a few long sequences keep all of a device busy
(Flash-Decoding); a second kernel joins them:

    positions      | before the window | split 0 | split 1 | split 2 |      length
    partial sums                          acc 0     acc 1     acc 2     float32
    result         sum of acc * 2^(max - max of all) / sum of sums alike

The cut follows from the sequence's own length, so that its result does not depend on the batch, nor
on how wide the block tables are. The grid is for all splits that the tables' width allows: what
lies beyond a sequence's end returns at once.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from engine.forward import AttentionCache, AttentionIndex
from engine.ops.paged_attention.fast import MIN_TILE
from engine.ops.scratch import Scratch

MIN_SPLIT = 256
"""Tokens of a split at least."""
MAX_SPLITS = 64
"""Of one sequence; beyond MIN_SPLIT * MAX_SPLITS tokens splits grow."""
HEAD_TILE = 16
"""Query heads of one program: the fewest rows of a product on tensor cores."""
TILE_BYTES = 32768
"""K and V that a program reads at once: two or three such tiles are under way, in shared memory."""


@triton.jit
def _cut(
    positions,
    row,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Begin and end of a decode's reads, tokens of a split: a matter of its length alone."""
    end = tl.load(positions + row).to(tl.int32) + 1
    begin = end * 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    even = tl.cdiv(tl.cdiv(end - begin, MAX_SPLITS), TOKENS) * TOKENS
    return begin, end, tl.maximum(even, MIN_SPLIT)


@triton.jit
def _load(at, channel, is_read, DIM: tl.constexpr):
    """Channels of the rows that lie `at` [rows, 1]; zero where a row is not read, and beyond DIM.

    0 * NaN is NaN, and memory of nobody may well hold it.
    """
    mask = is_read[:, None] & (channel < DIM)[None, :]
    return tl.load(at + channel[None, :], mask=mask, other=0.0)


# Widths of tables and numbers of splits change from step to step: no kernel of their own for each.
@triton.jit(do_not_specialize=["table_row", "num_splits"])
def decode_kernel(
    q,
    k_pages,
    v_pages,
    tables,
    positions,
    stats,
    partial,
    scale,
    q_row,
    q_head,
    k_page,
    k_head,
    k_token,
    v_page,
    v_head,
    v_token,
    table_row,
    num_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One split of one sequence for up to HEAD_TILE query heads that share a kv head.

    Of each head, `stats` [rows, HEADS, splits, 2] gets the largest score and the sum of weights,
    `partial` [rows, HEADS, splits, DIM] the sum of weighted values.

    A head's DIM channels are worked on as FIRST and REST, both powers of two (REST 0: none); so
    576 channels take 512 + 64, not 1024.
    """
    row = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    tiles: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    kv_head = tl.program_id(0) // tiles
    begin, end, size = _cut(positions, row, WINDOW, TOKENS, MIN_SPLIT, MAX_SPLITS)
    begin += split * size
    if begin >= end:
        return
    end = tl.minimum(end, begin + size)

    member = tl.program_id(0) % tiles * HEAD_TILE + tl.arange(0, HEAD_TILE)
    head = kv_head * GROUP + member
    has_head = member < GROUP
    low = tl.arange(0, FIRST)
    q_at = q + row * q_row + head[:, None] * q_head
    q_low = _load(q_at, low, has_head, DIM)
    acc_low = tl.zeros((HEAD_TILE, FIRST), tl.float32)
    if REST > 0:
        high = FIRST + tl.arange(0, REST)
        q_high = _load(q_at, high, has_head, DIM)
        acc_high = tl.zeros((HEAD_TILE, REST), tl.float32)
    top = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    for start in range(begin, end, TOKENS):
        place = start + tl.arange(0, TOKENS)
        is_read = place < end
        page = tl.load(tables + row * table_row + place // BLOCK_SIZE, mask=is_read, other=0)
        token = place % BLOCK_SIZE
        k_at = k_pages + (page * k_page + kv_head * k_head + token * k_token)[:, None]
        k_low = _load(k_at, low, is_read, DIM)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        if REST > 0:
            k_high = _load(k_at, high, is_read, DIM)
            scores += tl.dot(q_high, tl.trans(k_high), input_precision="ieee")
        scores = tl.where(is_read[None, :], scores * scale, float("-inf"))
        # At least one token of a tile is read, so that the maximum is a number.
        grown = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - grown[:, None])
        fade = tl.exp2(top - grown)
        total = total * fade + tl.sum(weights, 1)
        top = grown
        v_low = k_low
        if not LATENT:
            v_at = v_pages + (page * v_page + kv_head * v_head + token * v_token)[:, None]
            v_low = _load(v_at, low, is_read, DIM)
        weights = weights.to(v_low.dtype)
        acc_low = acc_low * fade[:, None] + tl.dot(weights, v_low, input_precision="ieee")
        if REST > 0:
            v_high = k_high
            if not LATENT:
                v_high = _load(v_at, high, is_read, DIM)
            acc_high = acc_high * fade[:, None] + tl.dot(weights, v_high, input_precision="ieee")

    part = (row * HEADS + head) * num_splits + split
    tl.store(stats + 2 * part, top, mask=has_head)
    tl.store(stats + 2 * part + 1, total, mask=has_head)
    part_at = partial + part[:, None] * DIM
    tl.store(part_at + low[None, :], acc_low, mask=has_head[:, None] & (low < DIM)[None, :])
    if REST > 0:
        tl.store(part_at + high[None, :], acc_high, mask=has_head[:, None] & (high < DIM)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    stats,
    partial,
    positions,
    y,
    num_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Joins the splits of one head of one sequence: y [rows, HEADS, DIM]; PARTS at once."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin, end, size = _cut(positions, row, WINDOW, TOKENS, MIN_SPLIT, MAX_SPLITS)
    count = tl.cdiv(end - begin, size)
    base = (row * HEADS + head) * num_splits
    # Always of the same width, so that sums have one order whatever the grid was.
    split = tl.arange(0, MAX_SPLITS)
    own = split < count
    stats += 2 * base
    heights = tl.load(stats + 2 * split, mask=own, other=float("-inf"))
    top = tl.max(heights, 0)
    totals = tl.load(stats + 2 * split + 1, mask=own, other=0.0)
    total = tl.sum(tl.exp2(heights - top) * totals, 0)
    channel = tl.arange(0, WIDTH)
    has_channel = channel < DIM
    acc = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        is_part = part < count
        share = tl.exp2(tl.load(stats + 2 * part, mask=is_part, other=float("-inf")) - top)
        sums_at = partial + (base + part)[:, None] * DIM + channel[None, :]
        found = tl.load(sums_at, mask=is_part[:, None] & has_channel[None, :], other=0.0)
        acc += tl.sum(share[:, None] * found, 0)
    at = y + (row * HEADS + head) * DIM + channel
    tl.store(at, (acc / total).to(y.dtype.element_ty), mask=has_channel)


@triton.jit(do_not_specialize=["count"])
def write_kernel(
    k,
    v,
    k_tokens,
    v_tokens,
    slots,
    count,
    k_row,
    k_head,
    v_row,
    v_head,
    k_token,
    v_token,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LATENT: tl.constexpr,
):
    """K and V of AT_ONCE of `count` heads of tokens to their slots; a slot of -1 takes nothing."""
    item = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    row, head = item // HEADS, item % HEADS
    slot = tl.load(slots + item, mask=item < count, other=-1)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    mask = (slot >= 0) & (channel < DIM)
    new = tl.load(k + (row * k_row + head * k_head)[:, None] + channel, mask=mask)
    tl.store(k_tokens + slot * k_token + channel, new, mask=mask)
    if not LATENT:
        new = tl.load(v + (row * v_row + head * v_head)[:, None] + channel, mask=mask)
        tl.store(v_tokens + slot * v_token + channel, new, mask=mask)


@triton.jit(do_not_specialize=["first", "count", "segment", "table_row"])
def gather_kernel(
    k_pages,
    v_pages,
    tables,
    k_found,
    v_found,
    first,
    count,
    segment,
    table_row,
    k_page,
    k_head,
    k_token,
    v_page,
    v_head,
    v_token,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """TOKENS of a sequence's positions from `first` on, of one kv head: [kv heads, count, DIM]."""
    head = tl.program_id(1).to(tl.int64)
    found = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_read = found < count
    place = first + found
    # Rows of a table lie as far apart as they may: 64 bits before the product.
    row_at = tables + segment.to(tl.int64) * table_row
    page = tl.load(row_at + place // BLOCK_SIZE, mask=is_read, other=0)
    token = place % BLOCK_SIZE
    channel = tl.arange(0, WIDTH)
    mask = is_read[:, None] & (channel < DIM)[None, :]
    to = (head * count + found)[:, None] * DIM + channel[None, :]
    at = (page * k_page + head * k_head + token * k_token)[:, None] + channel[None, :]
    tl.store(k_found + to, tl.load(k_pages + at, mask=mask), mask=mask)
    if not LATENT:
        at = (page * v_page + head * v_head + token * v_token)[:, None] + channel[None, :]
        tl.store(v_found + to, tl.load(v_pages + at, mask=mask), mask=mask)


class CudaAttention:
    """See `backend.PagedAttention`; scores and sums are float32, weights have the pages' dtype.

    A decode's result depends on its sequence alone, bit by bit. Segments' K and V are gathered:
    `scratch` grows to those of one layer and one segment.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: AttentionCache,
        index: AttentionIndex,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        lens = index.lens
        write_tokens(k, v, cache, index.slot_mapping)
        y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        start = lens.num_decodes
        if start:
            decode(q[:start], cache, index, scale=scale, window=window, y=y)
        for segment in range(start, len(lens.query_lens)):
            end, context = start + lens.query_lens[segment], lens.context_lens[segment]
            first = 0 if window is None else max(0, context - window + 1)
            count = context + end - start - first
            found = gather(cache, index, segment, first=first, count=count, scratch=self._scratch)
            prefill(q[start:end], *found, scale=scale, window=window, y=y[start:end])
            start = end
        return y.view(q.shape[0], -1)


def decode(
    q: Tensor,
    cache: AttentionCache,
    index: AttentionIndex,
    *,
    scale: float,
    window: int | None,
    y: Tensor,
) -> None:
    """The newest token of the first sequences, whose K and V are written: q [S, H, D] to y's rows.

    A sequence's length is its position + 1, as the device knows it.
    """
    rows, heads, dim = q.shape
    _, kv_heads, block_size, _ = cache.k_pages.shape
    latent = cache.v_pages is cache.k_pages
    seen = index.block_tables.shape[1] * block_size
    seen = seen if window is None else min(seen, window)
    splits = min(MAX_SPLITS, triton.cdiv(seen, MIN_SPLIT))
    first, rest = channel_tiles(dim)
    cut = {
        "WINDOW": window or 0,
        "TOKENS": tokens_at_once(cache.k_pages, first + rest, latent=latent),
        "MIN_SPLIT": MIN_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
    }
    # Not from `scratch`, which may give a buffer up for a longer one: a graph keeps this address.
    stats = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=q.device)
    partial = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    decode_kernel[kv_heads * triton.cdiv(group, HEAD_TILE), splits, rows](
        q,
        cache.k_pages,
        cache.v_pages,
        index.block_tables,
        index.positions,
        stats,
        partial,
        # Powers of two are what the device has: e^x = 2^(x log2(e)).
        scale * math.log2(math.e),
        *q.stride()[:2],
        *cache.k_pages.stride()[:3],
        *cache.v_pages.stride()[:3],
        index.block_tables.stride(0),
        splits,
        HEADS=heads,
        GROUP=group,
        HEAD_TILE=HEAD_TILE,
        DIM=dim,
        FIRST=first,
        REST=rest,
        BLOCK_SIZE=block_size,
        LATENT=latent,
        **cut,
        num_warps=4,
        num_stages=3,
    )
    combine_kernel[heads, rows](
        stats,
        partial,
        index.positions,
        y,
        splits,
        HEADS=heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        **cut,
        PARTS=8,
        num_warps=4,
    )


def channel_tiles(dim: int) -> tuple[int, int]:
    """Two powers of two, 16 at least, that hold `dim` channels; the second is 0 if it saves none.

    576 -> 512, 64; 80 -> 64, 16; 128 -> 128, 0; 7 -> 16, 0.
    """
    whole = max(16, triton.next_power_of_2(dim))
    first = whole // 2
    if dim <= first or first < 16:
        return whole, 0
    rest = max(16, triton.next_power_of_2(dim - first))
    return (first, rest) if first + rest < whole else (whole, 0)


def tokens_at_once(pages: Tensor, width: int, *, latent: bool) -> int:
    """Tokens of one tile: a power of two, TILE_BYTES in all, but 16 to 128."""
    size = width * pages.element_size() * (1 if latent else 2)
    fitting = max(1, TILE_BYTES // size)
    return min(128, max(16, 1 << (fitting.bit_length() - 1)))


def write_tokens(k: Tensor, v: Tensor | None, cache: AttentionCache, slot_mapping: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `slot_mapping` int64 [T * Hkv] (heads fastest), but not at -1."""
    rows, heads, dim = k.shape
    width = triton.next_power_of_2(dim)
    at_once = max(1, 1024 // width)
    # Without V, K stands in for it: the kernel does not read it.
    values = k if v is None else v
    write_kernel[triton.cdiv(rows * heads, at_once),](
        k,
        values,
        cache.k_tokens,
        cache.v_tokens,
        slot_mapping,
        rows * heads,
        *k.stride()[:2],
        *values.stride()[:2],
        cache.k_tokens.stride(0),
        cache.v_tokens.stride(0),
        HEADS=heads,
        DIM=dim,
        WIDTH=width,
        AT_ONCE=at_once,
        LATENT=v is None,
    )


def gather(
    cache: AttentionCache,
    index: AttentionIndex,
    segment: int,
    *,
    first: int,
    count: int,
    scratch: Scratch,
) -> tuple[Tensor, Tensor]:
    """K and V of `count` positions from `first` on, of sequence `segment`: both [Hkv, count, D].

    Valid until the next call.
    """
    _, kv_heads, block_size, dim = cache.k_pages.shape
    latent = cache.v_pages is cache.k_pages
    width = triton.next_power_of_2(dim)
    tokens = max(1, 4096 // width)
    k = scratch.take("k", (kv_heads, count, dim), cache.k_pages)
    v = k if latent else scratch.take("v", (kv_heads, count, dim), cache.v_pages)
    gather_kernel[triton.cdiv(count, tokens), kv_heads](
        cache.k_pages,
        cache.v_pages,
        index.block_tables,
        k,
        v,
        first,
        count,
        segment,
        index.block_tables.stride(0),
        *cache.k_pages.stride()[:3],
        *cache.v_pages.stride()[:3],
        DIM=dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        LATENT=latent,
        TOKENS=tokens,
    )
    return k, v


def prefill(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, y: Tensor
) -> None:
    """The last n positions of k, v [Hkv, L, D]: q [n, H, D] to y of the same shape.

    k and v begin where the first token's window does. In tiles of the window, which each read
    their window instead of all tokens; so do masks, which else are n x L.
    """
    n, context = q.shape[0], k.shape[1] - q.shape[0]
    tile = n if window is None else max(window, MIN_TILE)
    for start in range(0, n, tile):
        end = min(start + tile, n)
        begin = 0 if window is None else max(0, context + start - window + 1)
        seen = slice(begin, context + end)
        y[start:end] = _attend(q[start:end], k[:, seen], v[:, seen], scale=scale, window=window)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """As `prefill`, in one tile: [n, H, D]."""
    (n, heads, _), (kv_heads, length, _) = q.shape, k.shape
    # kv heads are torch's batch, and a group's query heads share K and V without a copy. Torch's
    # own `enable_gqa` would leave us its flash kernel alone, which knows 16 bits and D <= 256 only:
    # float32 and latents of 576 channels go to its memory-efficient kernel.
    shared = (kv_heads, heads // kv_heads, length, k.shape[2])
    out = F.scaled_dot_product_attention(
        q.unflatten(1, shared[:2]).permute(1, 2, 0, 3),
        k.unsqueeze(1).expand(shared),
        v.unsqueeze(1).expand(shared),
        attn_mask=_mask(n, length, window, device=q.device),
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _mask(n: int, length: int, window: int | None, *, device: torch.device) -> Tensor:
    """Which of `length` positions the last n may read."""
    if window is None or length <= window:
        # Known to the kernels by its two numbers, without a tensor [n, length].
        return causal_lower_right(n, length)
    mask = torch.ones(n, length, dtype=torch.bool, device=device)
    return mask.tril_(length - n).triu_(length - n - window + 1)
