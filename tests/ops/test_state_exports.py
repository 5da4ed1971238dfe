"""States exported from inside of segments: of the causal convolution and of all recurrences."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.ops.causal_conv1d import fast as fast_conv
from engine.ops.causal_conv1d import naive as naive_conv
from engine.ops.chunk_grid import CHUNK, ChunkGrid
from engine.ops.gated_delta_rule import fast as fast_delta
from engine.ops.gated_delta_rule import naive as naive_delta
from engine.ops.selective_scan import fast as fast_scan
from engine.ops.selective_scan import naive as naive_scan
from engine.ops.ssd import fast as fast_ssd
from engine.ops.ssd import naive as naive_ssd

Exports = Sequence[tuple[int, int]]
Results = tuple[Tensor, Tensor, Tensor]
Chunk = Callable[..., Results]

KERNEL, HEADS, GROUPS, DIM = 4, 4, 2, 8
BORDERS = (1, KERNEL - 2, KERNEL - 1, KERNEL, CHUNK - 1, CHUNK, CHUNK + 1, 150, 199, 200)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, BIAS = rand(KERNEL, DIM, seed=1), rand(DIM, seed=2)
RATES = -torch.linspace(0.02, 4.0, HEADS)


def conv(
    chunk: Chunk, rows: list[Tensor], lens: list[int], initial: Tensor, at: Exports
) -> Results:
    return chunk(rows[0], lens, initial, WEIGHT, BIAS, exports=at)


def delta(
    chunk: Chunk, rows: list[Tensor], lens: list[int], initial: Tensor, at: Exports
) -> Results:
    q, k, v, rate = rows
    g, beta = -rate[..., 0].exp(), rate[..., 1].sigmoid()
    return chunk(q, k, v, g, beta=beta, query_lens=lens, initial=initial, exports=at)


def delta_by_channel(
    chunk: Chunk, rows: list[Tensor], lens: list[int], initial: Tensor, at: Exports
) -> Results:
    *qkv, rate, gate = rows
    g, beta = -rate.exp(), gate[..., 0].sigmoid()
    return chunk(*qkv, g, beta=beta, query_lens=lens, initial=initial, exports=at)


def scan(
    chunk: Chunk, rows: list[Tensor], lens: list[int], initial: Tensor, at: Exports
) -> Results:
    x, b, c, dt = rows
    a = RATES.unsqueeze(-1).expand(HEADS, DIM).contiguous()
    return chunk(x, dt.sigmoid() / 2, a, b, c, query_lens=lens, initial=initial, exports=at)


def ssd(chunk: Chunk, rows: list[Tensor], lens: list[int], initial: Tensor, at: Exports) -> Results:
    x, b, c, dt = rows
    dt = dt[..., 0].sigmoid() / 2
    return chunk(x, dt, RATES, b, c, query_lens=lens, initial=initial, exports=at)


@dataclass(slots=True, frozen=True)
class Op:
    """An operator's two forms, how to call them, and the shapes of its rows and of one state."""

    call: Callable[[Chunk, list[Tensor], list[int], Tensor, Exports], Results]
    fast: Chunk
    naive: Chunk
    rows: list[tuple[int, ...]]
    state: tuple[int, ...]

    def draw(self, lens: list[int]) -> tuple[list[Tensor], Tensor]:
        """Rows of all segments and a state to start each with."""
        rows = [rand(sum(lens), *shape, seed=seed) for seed, shape in enumerate(self.rows)]
        return rows, rand(len(lens), *self.state, seed=9)


WIDE, NARROW = (HEADS, DIM), (GROUPS, DIM)
GATES, STATE = (HEADS, 2), (HEADS, DIM, DIM)
OPS = [
    Op(conv, fast_conv.conv_chunk, naive_conv.conv_chunk, [(DIM,)], (KERNEL - 1, DIM)),
    Op(delta, fast_delta.chunk, naive_delta.chunk, [NARROW, NARROW, WIDE, GATES], STATE),
    Op(
        delta_by_channel,
        fast_delta.chunk,
        naive_delta.chunk,
        [NARROW, NARROW, WIDE, WIDE, GATES],
        STATE,
    ),
    Op(scan, fast_scan.chunk, naive_scan.chunk, [(DIM,), (HEADS,), (HEADS,), (DIM,)], (HEADS, DIM)),
    Op(ssd, fast_ssd.ssd_chunk, naive_ssd.ssd_chunk, [WIDE, NARROW, NARROW, GATES], STATE),
]


def random_case(seed: int) -> tuple[list[int], Exports]:
    draw = random.Random(seed)
    lens = [draw.choice([1, 5, 64, 100, 150]) for _ in range(draw.randint(1, 4))]
    inside = [(segment, offset + 1) for segment, n in enumerate(lens) for offset in range(n)]
    return lens, sorted(draw.sample(inside, min(5, len(inside))))


CASES: list[tuple[list[int], Exports]] = [
    *(([200], [(0, offset)]) for offset in BORDERS),
    ([200], [(0, offset) for offset in BORDERS]),
    ([128], [(0, 64), (0, 128)]),
    ([150, 1, 77, 64], [(0, 1), (0, 65), (0, 150), (1, 1), (2, 2), (2, 76), (3, 64)]),
    ([20, 90, 90, 20], [(0, 10), (2, 3), (2, 67), (3, 19)]),
    *(random_case(seed) for seed in range(6)),
]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.call.__name__)
each_case = pytest.mark.parametrize(("lens", "exports"), CASES, ids=str)


def assert_close(ours: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    torch.testing.assert_close(tuple(ours), tuple(truth), rtol=2e-5, atol=2e-5)


@each_op
@each_case
def test_exports_are_the_states_between_tokens(op: Op, lens: list[int], exports: Exports) -> None:
    rows, initial = op.draw(lens)
    got = op.call(op.fast, rows, lens, initial, exports)
    assert_close(got, op.call(op.naive, rows, lens, initial, exports))
    assert got[2].shape == (len(exports), *op.state)


@each_op
@each_case
def test_exports_change_no_result(op: Op, lens: list[int], exports: Exports) -> None:
    rows, initial = op.draw(lens)
    with_exports = op.call(op.fast, rows, lens, initial, exports)
    without = op.call(op.fast, rows, lens, initial, ())
    assert_close(with_exports[:2], without[:2])
    assert without[2].shape == (0, *op.state)


@each_op
@each_case
def test_an_exported_state_ends_one_run_and_starts_the_next(
    op: Op, lens: list[int], exports: Exports
) -> None:
    rows, initial = op.draw(lens)
    y, final, states = op.call(op.fast, rows, lens, initial, exports)
    for place, (segment, offset) in enumerate(exports):
        start, state = sum(lens[:segment]), states[place : place + 1]
        cut, end = start + offset, start + lens[segment]
        before, one = [x[start:cut] for x in rows], initial[segment : segment + 1]
        assert_close([state], [op.call(op.fast, before, [offset], one, ())[1]])
        if cut < end:
            after = [x[cut:end] for x in rows]
            rest, last, _ = op.call(op.fast, after, [end - cut], state, ())
            assert_close([rest, last], [y[cut:end], final[segment : segment + 1]])


def tokens_by_chunk(grid: ChunkGrid) -> list[list[int]]:
    """Token numbers, counted from 1, in each chunk; pads left out."""
    chunks = grid.spread(torch.arange(1, grid.tokens + 1).unsqueeze(-1))[:, 0]
    return [[int(token) for token in chunk if token] for chunk in chunks]


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def test_without_exports_chunks_are_whole_and_longest_segments_come_first() -> None:
    grid = ChunkGrid.over([65, 130], torch.device("cpu"))
    assert grid.active == [2, 2, 1]
    expected = [span(66, 129), span(1, 64), span(130, 193), span(65, 65), span(194, 195)]
    assert tokens_by_chunk(grid) == expected


def test_a_chunk_ends_at_an_export_and_whole_ones_follow() -> None:
    exports = [(0, 64), (1, 3), (1, 4), (1, 130)]
    grid = ChunkGrid.over([128, 130], torch.device("cpu"), exports)
    assert grid.active == [2, 2, 1, 1]
    assert tokens_by_chunk(grid) == [
        *(span(129, 131), span(1, 64), span(132, 132), span(65, 128)),
        *(span(133, 196), span(197, 258)),
    ]


@pytest.mark.parametrize("export", [(0, 0), (0, 101), (1, 1), (-1, 5)], ids=str)
def test_an_export_outside_of_its_segment_is_named(export: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"export \({export[0]}, {export[1]}\) .*\[100\] tokens"):
        ChunkGrid.over([100], torch.device("cpu"), [export])
