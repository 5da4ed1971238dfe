"""The causal convolutions against the token-by-token one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.backend import CausalConv1d
from engine.ops.causal_conv1d import fast, naive
from engine.ops.causal_conv1d.native import NativeConv
from tests.ops.batches import BATCHES, Batch, memory_of, moved, pool_of
from tests.ops.native import native_kernels

CHANNELS = 24
SEGMENTS = [[1], [2], [15], [63], [64], [65], [300], [129, 1, 2, 64, 300]]


def inputs(tokens: int, sequences: int, kernel: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens + kernel)
    shapes = [
        (tokens, CHANNELS),
        (sequences, kernel - 1, CHANNELS),
        (kernel, CHANNELS),
        (CHANNELS,),
    ]
    x, state, weight, bias = (torch.randn(shape, generator=draw) for shape in shapes)
    return x, state, weight, bias


@pytest.mark.parametrize("lens", SEGMENTS, ids=str)
@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_chunk_equals_naive(lens: list[int], kernel: int, with_bias: bool, silu: bool) -> None:
    x, state, weight, bias = inputs(sum(lens), len(lens), kernel)
    before = state.clone()
    bias_or_none = bias if with_bias else None
    expected = naive.conv_chunk(x, lens, state, weight, bias_or_none, silu=silu)
    got = fast.conv_chunk(x, lens, state, weight, bias_or_none, silu=silu)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, before)


@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("silu", [False, True])
def test_step_equals_naive_and_moves_only_its_view(sequences: int, silu: bool) -> None:
    x, state, weight, bias = inputs(sequences, sequences, 4)
    arena = torch.full((sequences, 1000), 7.0)
    view = arena.as_strided((sequences, 3, CHANNELS), (1000, CHANNELS, 1), 100)
    view.copy_(state)
    expected = naive.conv_step(x, state, weight, bias, silu=silu)
    got = fast.conv_step(x, view, weight, bias, silu=silu)
    torch.testing.assert_close(got, expected)
    assert torch.equal(view, state)
    view.fill_(7.0)
    assert torch.equal(arena, torch.full_like(arena, 7.0))


def test_without_silu_the_result_is_the_sum() -> None:
    x, state, weight, bias = inputs(70, 1, 4)
    sums, _, _ = naive.conv_chunk(x, [70], state, weight, bias, silu=False)
    through, _, _ = naive.conv_chunk(x, [70], state, weight, bias)
    torch.testing.assert_close(F.silu(sums), through)
    padded = torch.cat([state[0], x]).t().unsqueeze(0)
    truth = F.conv1d(padded, weight.t().unsqueeze(1), bias, groups=CHANNELS)
    torch.testing.assert_close(sums, truth[0].t(), rtol=1e-5, atol=1e-5)


def test_a_sequence_may_be_cut_anywhere() -> None:
    x, state, weight, bias = inputs(200, 1, 4)
    whole, final, _ = fast.conv_chunk(x, [200], state, weight, bias)
    parts = []
    for part in x.split_with_sizes([1, 2, 64, 133]):
        y, state, _ = fast.conv_chunk(part, [len(part)], state, weight, bias)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole)
    assert torch.equal(state, final)


def test_bfloat16_sums_in_float32() -> None:
    x, state, weight, bias = (t.bfloat16() for t in inputs(65, 1, 4))
    got, final, _ = fast.conv_chunk(x, [65], state, weight, bias)
    expected, expected_final, _ = naive.conv_chunk(x, [65], state, weight, bias)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected)
    assert torch.equal(final, expected_final)


def native(dtype: torch.dtype) -> CausalConv1d:
    return NativeConv(native_kernels(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda _: fast.causal_conv1d, native], ids=["torch", "native"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("kernel", "silu"), [(4, True), (2, False)])
def test_a_batch_is_what_naive_makes_of_it(
    make: Callable[[torch.dtype], CausalConv1d],
    dtype: torch.dtype,
    batch: Batch,
    *,
    kernel: int,
    silu: bool,
) -> None:
    """Rows are a slice of longer ones, and the pool holds other numbers between its units."""
    draw = torch.Generator().manual_seed(kernel)
    x, weight = (
        torch.randn(rows, 60, generator=draw).to(dtype)[:, 7:42] for rows in (batch.tokens, kernel)
    )
    weight = weight.contiguous()
    bias = weight[-1].clone() if silu else None
    ours, theirs = (pool_of((kernel - 1, 35), dtype) for _ in range(2))
    found = make(dtype)(x, ours, batch.index(), weight, bias, silu=silu)
    wanted = moved(
        theirs,
        batch,
        lambda lens, states, exports: naive.conv_chunk(
            x, lens, states, weight, bias, exports=exports, silu=silu
        ),
    )
    torch.testing.assert_close(found, wanted)
    assert torch.equal(memory_of(ours), memory_of(theirs))
