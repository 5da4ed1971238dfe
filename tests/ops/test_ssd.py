"""The state space dualities against the token-by-token recurrence, at every border."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.forward import StateExport
from engine.ops.backend import StateSpaceDuality
from engine.ops.ssd import fast, naive
from engine.ops.ssd.native import NativeSSD
from engine.ops.ssd.parameters import SSDParameters
from tests.ops.batches import BATCHES, Batch, memory_of, moved, pool_of
from tests.ops.native import native_kernels

# Both sides are float32; with decays near one, outputs are sums of hundreds of terms and pass 100,
# where the rounding unit is 8e-6. Measured: 2.5e-5 at most. A lost decay or token is off by 0.1.
TOLERANCE = 6e-5

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

HEADS, HEAD_DIM, STATE_SIZE = 8, 6, 10


def draw_inputs(tokens: int, groups: int, seed: int = 0) -> Inputs:
    """x, dt, a, b, c: decays from almost none to almost total."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HEADS, HEAD_DIM, generator=draw)
    dt = torch.rand(tokens, HEADS, generator=draw) * 0.5
    a = -torch.linspace(0.01, 16.0, HEADS)
    b, c = torch.randn(2, tokens, groups, STATE_SIZE, generator=draw)
    return x, dt, a, b, c


def draw_states(count: int, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS, HEAD_DIM, STATE_SIZE, generator=draw)


def assert_close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(
    "lens",
    [[1], [15], [63], [64], [65], [300], [128, 64], [300, 1, 77, 64], [2, 63, 65]],
    ids=lambda lens: "+".join(map(str, lens)),
)
def test_chunk_equals_recurrence(lens: list[int], groups: int) -> None:
    inputs, initial = draw_inputs(sum(lens), groups), draw_states(len(lens))
    before = initial.clone()
    y, final, _ = fast.ssd_chunk(*inputs, query_lens=lens, initial=initial)
    true_y, true_final, _ = naive.ssd_chunk(*inputs, query_lens=lens, initial=initial)
    assert_close(y, true_y)
    assert_close(final, true_final)
    assert torch.equal(initial, before)


@pytest.mark.parametrize("cut", [1, 50, 64, 129])
def test_cutting_a_sequence_changes_nothing(cut: int) -> None:
    x, dt, a, b, c = draw_inputs(200, 2)
    initial = draw_states(1)
    whole, final, _ = fast.ssd_chunk(x, dt, a, b, c, query_lens=[200], initial=initial)
    head, middle, _ = fast.ssd_chunk(
        x[:cut], dt[:cut], a, b[:cut], c[:cut], query_lens=[cut], initial=initial
    )
    tail, end, _ = fast.ssd_chunk(
        x[cut:], dt[cut:], a, b[cut:], c[cut:], query_lens=[200 - cut], initial=middle
    )
    assert_close(torch.cat([head, tail]), whole)
    assert_close(end, final)


def test_neighbours_in_a_batch_change_no_bit() -> None:
    x, dt, a, b, c = draw_inputs(300, 2)
    states = draw_states(3)
    lens = [100, 130, 70]
    y, final, _ = fast.ssd_chunk(x, dt, a, b, c, query_lens=lens, initial=states)
    rows = slice(100, 230)
    alone, own, _ = fast.ssd_chunk(
        x[rows], dt[rows], a, b[rows], c[rows], query_lens=[130], initial=states[1:2]
    )
    assert torch.equal(alone, y[rows])
    assert torch.equal(own, final[1:2])


def test_weak_decay_after_strong_decay_keeps_its_digits() -> None:
    """Sums of decay reach 1e5 within a chunk, where float32 could not tell a step from the next."""
    x, dt, a, b, c = draw_inputs(128, 2)
    dt[1::2] *= 1e-5
    inputs = (x, dt, a - 1000.0, b, c)
    y, final, _ = fast.ssd_chunk(*inputs, query_lens=[128], initial=draw_states(1))
    true_y, true_final, _ = naive.ssd_chunk(*inputs, query_lens=[128], initial=draw_states(1))
    assert_close(y, true_y)
    assert_close(final, true_final)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 5])
def test_step_updates_a_strided_view_in_place(count: int, groups: int) -> None:
    inputs = draw_inputs(count, groups)
    size = HEADS * HEAD_DIM * STATE_SIZE
    pool = torch.randn(count + 2, size + 7, generator=torch.Generator().manual_seed(2))
    untouched = pool.clone()
    strides = (size + 7, HEAD_DIM * STATE_SIZE, STATE_SIZE, 1)
    shape = (count, HEADS, HEAD_DIM, STATE_SIZE)
    state = pool.as_strided(shape, strides, size + 7 + 3)
    truth = state.clone()
    y = fast.ssd_step(*inputs, state)
    assert_close(y, naive.ssd_step(*inputs, truth))
    assert_close(state, truth)
    state.copy_(untouched.as_strided(shape, strides, size + 7 + 3))
    assert torch.equal(pool, untouched)


def test_steps_equal_a_chunk() -> None:
    x, dt, a, b, c = draw_inputs(70, 2)
    state = draw_states(1)
    y, final, _ = fast.ssd_chunk(x, dt, a, b, c, query_lens=[70], initial=state)
    rows = [slice(row, row + 1) for row in range(70)]
    steps = [fast.ssd_step(x[r], dt[r], a, b[r], c[r], state) for r in rows]
    assert_close(torch.cat(steps), y)
    assert_close(state, final)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    x, dt, a, b, c = draw_inputs(70, 2)
    narrow = [part.bfloat16() for part in (x, b, c)]
    wide = [part.float() for part in narrow]
    y, _, _ = fast.ssd_chunk(
        narrow[0], dt, a, narrow[1], narrow[2], query_lens=[70], initial=draw_states(1)
    )
    truth, _, _ = naive.ssd_chunk(
        wide[0], dt, a, wide[1], wide[2], query_lens=[70], initial=draw_states(1)
    )
    assert_close(y, truth)


def native(dtype: torch.dtype) -> StateSpaceDuality:
    return NativeSSD(native_kernels(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda _: fast.ssd, native], ids=["torch", "native"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("dim", "size", "groups"), [(6, 10, 2), (33, 37, 1), (16, 32, 6)])
@pytest.mark.parametrize("as_in", ["Mamba2", "lightning attention"])
def test_a_batch_is_what_naive_makes_of_it(
    make: Callable[[torch.dtype], StateSpaceDuality],
    dtype: torch.dtype,
    batch: Batch,
    *,
    dim: int,
    size: int,
    groups: int,
    as_in: str,
) -> None:
    """Rows are slices of one product, and the pool holds other numbers between its units."""
    draw, heads = torch.Generator().manual_seed(dim), 6
    parts = [heads * dim, groups * size, groups * size, heads]
    joined = torch.randn(batch.tokens, 3 + sum(parts), generator=draw).to(dtype)[:, 3:]
    x, b, c, dt = joined.split_with_sizes(parts, dim=1)
    x, b, c = x.view(-1, heads, dim), b.view(-1, groups, size), c.view(-1, groups, size)
    parameters = SSDParameters(a=-torch.linspace(0.01, 8.0, heads))
    steps = None
    if as_in == "Mamba2":
        bias, d = torch.tensor([-30.0, -9.0, -1.0, 0.0, 2.0, 25.0]), torch.randn(heads)
        parameters = SSDParameters(a=parameters.a, dt_bias=bias, limits=(1e-4, 9.0), d=d)
        steps = dt
    ours, theirs = (pool_of((heads, dim, size), torch.float32) for _ in range(2))
    found = make(dtype)(x, steps, b, c, ours, batch.index(), parameters=parameters)
    truth = partial(naive.ssd, x, steps, b, c, parameters=parameters)
    wanted = moved(
        theirs,
        batch,
        lambda lens, states, exports: truth(query_lens=lens, initial=states, exports=exports),
    )
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-4)
    torch.testing.assert_close(memory_of(ours), memory_of(theirs), rtol=2e-5, atol=2e-5)


def drawn(tokens: int, rates: list[float]) -> tuple[list[Tensor], SSDParameters]:
    """x, dt, b and c, of heads of 37 in two groups of size 21; dt is 0.5 to 2 after softplus."""
    draw, heads = torch.Generator().manual_seed(tokens), len(rates)
    x = torch.randn(tokens, heads, 37, generator=draw)
    dt = torch.rand(tokens, heads, generator=draw) * 2.3 - 0.4
    b, c = torch.randn(2, tokens, 2, 21, generator=draw)
    return [x, dt, b, c], SSDParameters(a=-torch.tensor(rates))


def test_a_long_segment_keeps_its_digits_at_any_decay() -> None:
    """Products of decays come to nothing within three tokens, or hardly fall in hundreds.

    Its last export is where it ends: no row is left for its own state.
    """
    (x, dt, b, c), parameters = drawn(600, [1e-4, 1e-2, 1.0, 10.0, 25.0, 50.0])
    ours, theirs = (pool_of((6, 37, 21), torch.float32) for _ in range(2))
    batch = Batch(0, [600], [3], (StateExport(0, 500, 5), StateExport(0, 600, 7)))
    found = native(torch.float32)(x, dt, b, c, ours, batch.index(), parameters=parameters)
    truth = partial(naive.ssd, x, dt, b, c, parameters=parameters)
    wanted = moved(
        theirs,
        batch,
        lambda lens, states, exports: truth(query_lens=lens, initial=states, exports=exports),
    )
    # Relative to a head's largest number, from sums of hundreds of terms or of next to none.
    pairs = [(ours[unit], theirs[unit]) for unit in (3, 5, 7)]
    for mine, other in [(found.transpose(0, 1), wanted.transpose(0, 1)), *pairs]:
        largest = other.abs().amax(dim=(1, 2), keepdim=True)
        torch.testing.assert_close(mine / largest, other / largest, rtol=0.0, atol=5e-6)


def test_neither_threads_nor_a_cut_after_a_whole_block_change_a_bit() -> None:
    rows, parameters = drawn(300, [1e-4, 1e-2, 1.0, 10.0])
    kernels = native_kernels()
    outputs, pools = [], []
    for threads, lens in [(1, [300]), (3, [48, 16, 236])]:
        kernels.threads = threads
        pool = pool_of((4, 37, 21), torch.float32)
        parts = zip(*(row.split_with_sizes(lens) for row in rows), strict=True)
        run = partial(NativeSSD(kernels), pool=pool, parameters=parameters)
        outputs.append(
            torch.cat([run(*part, index=Batch(0, [len(part[0])], [3]).index()) for part in parts])
        )
        pools.append(memory_of(pool))
    assert torch.equal(*outputs)
    assert torch.equal(*pools)
