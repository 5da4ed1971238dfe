"""Paged attention over scattered pages against naive, and against plain attention."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex, SequenceLens
from engine.ops.backend import PagedAttention
from engine.ops.paged_attention import fast, naive
from engine.ops.paged_attention.native import NativeAttention
from engine.ops.scratch import Scratch
from tests.ops.native import native_kernels

BLOCK, DIM, ROWS = 16, 8, 200
SCALE = DIM**-0.5


def cache_of(kv_heads: int, dtype: torch.dtype = torch.float32) -> AttentionCache:
    draw = torch.Generator().manual_seed(5)
    k, v = (
        (torch.randn(ROWS, kv_heads, BLOCK, DIM, generator=draw) * 10).to(dtype) for _ in range(2)
    )
    return AttentionCache(k, v, k.view(-1, DIM), v.view(-1, DIM))


def tables_of(lens: list[int]) -> Tensor:
    blocks = -(-max(lens) // BLOCK)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    return order[: len(lens) * blocks].view(len(lens), blocks)


def queries(rows: int, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, heads, DIM, generator=draw).to(dtype)


def native_attention(dtype: torch.dtype = torch.float32) -> PagedAttention:
    return NativeAttention(native_kernels(dtype))


def fast_attention(dtype: torch.dtype = torch.float32) -> PagedAttention:
    return partial(fast.paged_attention, scratch=Scratch())


def native_batch(
    q: Tensor,
    cache: AttentionCache,
    block_tables: Tensor,
    *,
    decodes: int,
    spans: list[range],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`spans`: new positions; their K and V, which the operator writes, lie there already."""
    kv_heads, dim = cache.k_pages.shape[1], q.shape[2]
    slots = [
        _slots(table, span.start, span.stop, kv_heads)
        for table, span in zip(block_tables, spans, strict=True)
    ]
    index = AttentionIndex(
        block_tables,
        torch.cat(slots),
        torch.tensor([position for span in spans for position in span]),
        SequenceLens(decodes, [len(span) for span in spans], [span.start for span in spans]),
    )
    k, v = (
        pages[index.slot_mapping].view(-1, kv_heads, dim)
        for pages in (cache.k_tokens, cache.v_tokens)
    )
    attend = native_attention(q.dtype)
    return attend(q, k, v, cache, index, scale=scale, window=window).view(q.shape)


def native_decode(
    q: Tensor,
    cache: AttentionCache,
    block_tables: Tensor,
    *,
    lens: list[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    return native_batch(
        q,
        cache,
        block_tables,
        decodes=len(lens),
        spans=[range(length - 1, length) for length in lens],
        scale=scale,
        window=window,
    )


def native_prefill(
    q: Tensor,
    cache: AttentionCache,
    block_row: Tensor,
    *,
    context: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    return native_batch(
        q,
        cache,
        block_row.unsqueeze(0),
        decodes=0,
        spans=[range(context, context + len(q))],
        scale=scale,
        window=window,
    )


Operator = Callable[..., Tensor]
DECODES: dict[str, Operator] = {
    "fast": partial(fast.decode, scratch=Scratch()),
    "native": native_decode,
}
PREFILLS: dict[str, Operator] = {
    "fast": partial(fast.prefill, scratch=Scratch()),
    "native": native_prefill,
}


@pytest.mark.parametrize("op", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize(
    "lens", [[1], [15], [16], [17], [300], [300, 1, 64, 65], [1, 1], [5, 280, 3, 4, 2, 1]], ids=str
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_decode_equals_naive(op: Operator, lens: list[int], heads: int, kv_heads: int) -> None:
    cache, tables, q = cache_of(kv_heads), tables_of(lens), queries(len(lens), heads)
    expected = naive.decode(q, cache, tables, lens=lens, scale=SCALE)
    got = op(q, cache, tables, lens=lens, scale=SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("op", PREFILLS.values(), ids=PREFILLS)
@pytest.mark.parametrize("context", [0, 1, 15, 16, 100])
@pytest.mark.parametrize("tokens", [1, 2, 15, 63, 64, 65, 200])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_prefill_equals_naive(
    op: Operator, context: int, tokens: int, heads: int, kv_heads: int
) -> None:
    cache, tables = cache_of(kv_heads), tables_of([context + tokens])
    q = queries(tokens, heads)
    expected = naive.prefill(q, cache, tables[0], context=context, scale=SCALE)
    got = op(q, cache, tables[0], context=context, scale=SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def hide_what_a_window_skips(tables: Tensor, firsts: list[int], cache: AttentionCache) -> None:
    """Blocks wholly before the first needed token become one null page, full of NaN."""
    null = ROWS - 1
    tables[tables == null] = int(tables.max()) - 1
    cache.k_pages[null] = float("nan")
    cache.v_pages[null] = float("nan")
    for row, first in zip(tables, firsts, strict=True):
        row[: first // BLOCK] = null


@pytest.mark.parametrize("window", [1, 2, 16, 17, 33, 400])
@pytest.mark.parametrize("lens", [[300], [300, 1, 64, 65], [17, 18], [5, 280, 3, 4, 2, 1]], ids=str)
@pytest.mark.parametrize("op", [naive.decode, *DECODES.values()], ids=["naive", *DECODES])
def test_decode_reads_its_window_only(op: Operator, window: int, lens: list[int]) -> None:
    cache, tables, q = cache_of(2), tables_of(lens), queries(len(lens), 4)
    hide_what_a_window_skips(tables, [max(0, length - window) for length in lens], cache)
    got = op(q, cache, tables, lens=lens, scale=SCALE, window=window)
    expected = [
        windowed(q[i : i + 1], cache, tables[i], context=length - 1, window=window)
        for i, length in enumerate(lens)
    ]
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("window", [1, 17, 64, 130])
@pytest.mark.parametrize("context", [0, 31, 100])
@pytest.mark.parametrize("tokens", [1, 2, 65, 150])
@pytest.mark.parametrize("op", [naive.prefill, *PREFILLS.values()], ids=["naive", *PREFILLS])
def test_prefill_reads_its_window_only(
    op: Operator, window: int, context: int, tokens: int
) -> None:
    cache, tables, q = cache_of(2), tables_of([context + tokens]), queries(tokens, 4)
    hide_what_a_window_skips(tables, [max(0, context + 1 - window)], cache)
    got = op(q, cache, tables[0], context=context, scale=SCALE, window=window)
    expected = windowed(q, cache, tables[0], context=context, window=window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def windowed(q: Tensor, cache: AttentionCache, row: Tensor, *, context: int, window: int) -> Tensor:
    """Attention with a band mask over the gathered tokens, where NaN pages are read as zeros."""
    length = context + q.shape[0]
    k, v = (
        pages[row].transpose(0, 1).flatten(1, 2)[:, :length].nan_to_num().repeat_interleave(2, 0)
        for pages in (cache.k_pages, cache.v_pages)
    )
    ages = torch.arange(context, length).unsqueeze(1) - torch.arange(length)
    mask = (ages >= 0) & (ages < window)
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=SCALE)
    return out.transpose(0, 1)


@pytest.mark.parametrize("op", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_ignores_what_lies_behind_a_sequence(op: Operator, dtype: torch.dtype) -> None:
    lens = [5, 40]
    cache, tables, q = cache_of(2, dtype), tables_of(lens), queries(2, 4, dtype)
    expected = op(q, cache, tables, lens=lens, scale=SCALE)
    garbage = 1e30 if dtype == torch.float32 else float("nan")
    cache.k_pages[tables[0, 0], :, 5:] = garbage
    cache.v_pages[tables[0, 0], :, 5:] = garbage
    cache.v_pages[tables[0, 1:]] = garbage
    assert torch.equal(op(q, cache, tables, lens=lens, scale=SCALE), expected)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_prefill_ignores_what_it_does_not_read(
    dtype: torch.dtype, window: int | None
) -> None:
    context, tokens = 40, 5
    cache, tables, q = cache_of(2, dtype), tables_of([64])[0], queries(tokens, 4, dtype)
    expected = native_prefill(q, cache, tables, context=context, scale=SCALE, window=window)
    first = 0 if window is None else context + 1 - window
    for position in (*range(first), *range(context + tokens, 64)):
        for pages in (cache.k_pages, cache.v_pages):
            pages[tables[position // BLOCK], :, position % BLOCK] = float("nan")
    got = native_prefill(q, cache, tables, context=context, scale=SCALE, window=window)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(5, 7), (4, 24), (9, 45), (3, 70), (2, 129)])
def test_native_attention_of_latents_of_any_size(heads: int, dim: int, dtype: torch.dtype) -> None:
    """All heads read one vector per token as K and V; rows and heads of q lie apart."""
    spans, decodes = [range(129, 130), range(2, 3), range(100, 150), range(13)], 2
    draw = torch.Generator().manual_seed(dim)
    pages = torch.randn(40, 1, BLOCK, dim, generator=draw).to(dtype)
    cache = AttentionCache(pages, pages, *[pages.view(-1, dim)] * 2)
    tables = torch.randperm(40, generator=draw).view(4, 10)
    slots = torch.cat(
        [_slots(row, span.start, span.stop, 1) for row, span in zip(tables, spans, strict=True)]
    )
    positions = torch.tensor([position for span in spans for position in span])
    lens = SequenceLens(decodes, [len(span) for span in spans], [span.start for span in spans])
    index, rows = AttentionIndex(tables, slots, positions, lens), len(positions)
    q = torch.randn(rows, heads + 2, dim + 3, generator=draw).to(dtype)[:, 1:-1, :dim]
    new = torch.randn(rows, 2, dim + 1, generator=draw).to(dtype)[:, 1:, :dim]
    got = native_attention(dtype)(q, new, None, cache, index, scale=0.3, window=None)
    assert torch.equal(pages.view(-1, dim)[slots], new[:, 0])
    expected = torch.cat(
        [
            naive.prefill(own, cache, row, context=span.start, scale=0.3)
            for own, row, span in zip(
                q.float().split_with_sizes(lens.query_lens), tables, spans, strict=True
            )
        ]
    )
    near = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(
        got.view(q.shape).float(), expected, rtol=near, atol=near * float(expected.abs().max())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_decode_depends_on_its_sequence_only(dtype: torch.dtype) -> None:
    """Bit by bit: not on the batch, its own pages, their size, nor on the threads."""
    lens = [5, 280, 64, 1]
    cache, tables, q = cache_of(2, dtype), tables_of(lens), queries(4, 4, dtype)
    together = native_decode(q, cache, tables, lens=lens, scale=SCALE, window=200)
    for place, length in enumerate(lens):
        # One page of them all, as long as the sequence.
        k, v = (
            pages[tables[place]].transpose(0, 1).reshape(1, 2, -1, DIM)
            for pages in (cache.k_pages, cache.v_pages)
        )
        moved = AttentionCache(k, v, k.view(-1, DIM), v.view(-1, DIM))
        kernels = native_kernels(dtype)
        kernels.threads = 3 - kernels.threads
        slots = torch.tensor([length - 1, k.shape[2] + length - 1])
        index = AttentionIndex(
            torch.zeros(1, 1, dtype=torch.int64),
            slots,
            torch.tensor([length - 1]),
            SequenceLens(1, [1], [length - 1]),
        )
        k, v = (pages[slots].view(1, 2, DIM) for pages in (moved.k_tokens, moved.v_tokens))
        attend = NativeAttention(kernels)
        alone = attend(q[place : place + 1], k, v, moved, index, scale=SCALE, window=200)
        assert torch.equal(alone.view(4, DIM), together[place])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_prefill_depends_on_its_sequence_only(
    dtype: torch.dtype, window: int | None
) -> None:
    """Bit by bit: not on where it is cut, its own pages nor their size, nor on the threads."""
    length = 500
    cache, tables, q = cache_of(2, dtype), tables_of([length]), queries(length, 6, dtype)
    whole = native_prefill(q, cache, tables[0], context=0, scale=SCALE, window=window)
    k, v = (
        pages[tables[0]].transpose(0, 1).reshape(1, 2, -1, DIM)
        for pages in (cache.k_pages, cache.v_pages)
    )
    moved = AttentionCache(k, v, k.view(-1, DIM), v.view(-1, DIM))
    kernels = native_kernels(dtype)
    kernels.threads = 3 - kernels.threads
    cuts = [0, 1, 6, 130, 163, length]
    for start, end in pairwise(cuts):
        slots = torch.arange(start, end).unsqueeze(1) + torch.tensor([0, k.shape[2]])
        index = AttentionIndex(
            torch.zeros(1, 1, dtype=torch.int64),
            slots.view(-1),
            torch.arange(start, end),
            SequenceLens(0, [end - start], [start]),
        )
        new_k, new_v = (pages[slots] for pages in (moved.k_tokens, moved.v_tokens))
        attend = NativeAttention(kernels)
        part = attend(q[start:end], new_k, new_v, moved, index, scale=SCALE, window=window)
        assert torch.equal(part.view(-1, 6, DIM), whole[start:end])


def test_what_is_broken_shows() -> None:
    cache, tables, q = cache_of(1), tables_of([20, 20]), queries(2, 2)
    cache.k_pages[tables[0, 1], 0, 2, 3] = float("nan")
    got = native_decode(q, cache, tables, lens=[20, 20], scale=SCALE)
    assert got[0].isnan().all()
    assert not got[1].isnan().any()
    got = native_prefill(queries(20, 2), cache, tables[0], context=0, scale=SCALE)
    assert got[18:].isnan().all()
    assert not got[:18].isnan().any()


@pytest.mark.parametrize("op", [naive, fast], ids=["naive", "fast"])
def test_tokens_are_written_to_their_slots_only(op: ModuleType) -> None:
    cache = cache_of(2)
    before = cache.k_tokens.clone()
    slots = torch.tensor([70, 86, 5, 21])
    k, v = queries(2, 2), queries(3, 2)[:2]
    op.write_tokens(k, v, cache, slots)
    assert torch.equal(cache.k_tokens[slots], k.view(-1, DIM))
    assert torch.equal(cache.v_tokens[slots], v.view(-1, DIM))
    before[slots] = k.view(-1, DIM)
    assert torch.equal(cache.k_tokens, before)


@pytest.mark.parametrize("make", [fast_attention, native_attention])
def test_a_mixed_batch_is_attention_over_each_sequence(make: Callable[[], PagedAttention]) -> None:
    contexts, lens = [33, 7, 20, 0], [1, 1, 30, 17]
    totals = [c + n for c, n in zip(contexts, lens, strict=True)]
    cache, tables = cache_of(2), tables_of(totals)
    k, v = (queries(sum(totals) + shift, 2)[: sum(totals)] for shift in (0, 1))
    slots = [_slots(tables[i], 0, total) for i, total in enumerate(totals)]
    fast.write_tokens(k, v, cache, torch.cat(slots))
    new = [slice(end - n, end) for end, n in zip(_ends(totals), lens, strict=True)]
    spans = list(zip(contexts, totals, strict=True))
    places = torch.cat([_slots(tables[i], *span) for i, span in enumerate(spans)])
    positions = torch.cat([torch.arange(*span) for span in spans])
    # The new tokens' places hold nothing yet.
    cache.k_tokens[places] = cache.v_tokens[places] = float("nan")
    q = queries(sum(lens), 4)
    got = make()(
        q,
        torch.cat([k[rows] for rows in new]),
        torch.cat([v[rows] for rows in new]),
        cache,
        AttentionIndex(tables, places, positions, SequenceLens(2, lens, contexts)),
        scale=SCALE,
        window=None,
    )
    expected = [
        _plain(q_one, k_one, v_one)
        for q_one, k_one, v_one in zip(
            q.split_with_sizes(lens),
            k.split_with_sizes(totals),
            v.split_with_sizes(totals),
            strict=True,
        )
    ]
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-5, atol=1e-5)


def _slots(table: Tensor, start: int, end: int, kv_heads: int = 2) -> Tensor:
    rows = [
        (int(table[t // BLOCK]) * kv_heads + head) * BLOCK + t % BLOCK
        for t in range(start, end)
        for head in range(kv_heads)
    ]
    return torch.tensor(rows)


def _ends(totals: list[int]) -> list[int]:
    return torch.tensor(totals).cumsum(0).tolist()


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last len(q) positions over contiguous k, v [L, 2, D] -> [n, H * D]."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    k, v = (x.transpose(0, 1).repeat_interleave(q.shape[1] // 2, 0) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=SCALE)
    return out.transpose(0, 1).reshape(len(q), -1)
