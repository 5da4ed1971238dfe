"""The fast selective scan against the float64 recurrence, held to float32's own error."""

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.ops.selective_scan import fast, naive

Exports = list[tuple[int, int]]
Results = tuple[Tensor, Tensor, Tensor]


@dataclass(slots=True, frozen=True)
class Case:
    """One random problem; decays from none to all of a state in one step."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    initial: Tensor

    @classmethod
    def draw(cls, tokens: int, sequences: int, channels: int, size: int) -> "Case":
        draw = torch.Generator().manual_seed(tokens)

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        return cls(
            x=rand(tokens, channels),
            dt=torch.exp(rand(tokens, channels) * 3 - 3),
            a=-torch.exp(rand(size, channels) * 2),
            b=rand(tokens, size),
            c=rand(tokens, size),
            initial=rand(sequences, size, channels),
        )

    def double(self) -> "Case":
        return Case(*(getattr(self, field.name).double() for field in fields(self)))

    def rows(self, rows: slice, initial: Tensor) -> "Case":
        return Case(self.x[rows], self.dt[rows], self.a, self.b[rows], self.c[rows], initial)

    def chunk(self, lens: list[int], exports: Exports, *, truth: bool = False) -> Results:
        run = naive.chunk if truth else fast.chunk
        operands = (self.x, self.dt, self.a, self.b, self.c)
        return run(*operands, query_lens=lens, initial=self.initial, exports=exports)


def worst(got: Results, truth: Results) -> float:
    pairs = zip(got, truth, strict=True)
    return max((a.double() - b).abs().max().item() for a, b in pairs if b.numel())


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], Exports]:
    """Lengths of segments and places of exports."""
    lens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    places = [(segment, offset) for segment, n in enumerate(lens) for offset in range(1, n + 1)]
    return lens, sorted(draw(st.sets(st.sampled_from(places), max_size=4)))


sizes = st.sampled_from([(1, 1), (7, 3), (24, 16), (33, 5)])


@given(batch=batches(), size=sizes, block=st.integers(1, 50))
def test_chunk_is_as_exact_as_the_recurrence(
    batch: tuple[list[int], Exports], size: tuple[int, int], block: int
) -> None:
    lens, exports = batch
    one = Case.draw(sum(lens), len(lens), *size)
    before = one.initial.clone()
    truth = one.double().chunk(lens, exports, truth=True)
    limit = 8 * worst(one.chunk(lens, exports, truth=True), truth) + 1e-6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "BLOCK", block * one.a.numel())
        got = one.chunk(lens, exports)
    assert worst(got, truth) < limit
    assert got[2].shape == (len(exports), *one.a.shape)
    assert torch.equal(one.initial, before)


@given(batch=batches(), block=st.integers(1, 50))
def test_neither_neighbours_nor_exports_change_a_bit(
    batch: tuple[list[int], Exports], block: int
) -> None:
    lens, exports = batch
    every = Case.draw(sum(lens), len(lens), 24, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "BLOCK", block * every.a.numel())
        y, final, _ = every.chunk(lens, exports)
        start = 0
        for segment, length in enumerate(lens):
            rows, own = slice(start, start + length), slice(segment, segment + 1)
            alone = every.rows(rows, every.initial[own]).chunk([length], [])
            assert torch.equal(alone[0], y[rows])
            assert torch.equal(alone[1], final[own])
            start += length


@pytest.mark.parametrize("block", [1, 4, 100])
@pytest.mark.parametrize("sequences", [1, 3, 9])
def test_step_equals_naive_and_moves_only_its_view(
    sequences: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Case.draw(sequences, sequences, 24, 10)
    monkeypatch.setattr(fast, "BLOCK", block * one.a.numel())
    stride = one.initial[0].numel() + 50
    arena = torch.full((sequences, stride), 7.0)
    view = arena.as_strided(one.initial.shape, (stride, *one.initial.stride()[1:]), 13)
    view.copy_(one.initial)
    operands = (one.x, one.dt, one.a, one.b, one.c)
    expected = naive.step(*operands, one.initial)
    torch.testing.assert_close(fast.step(*operands, view), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(view, one.initial, rtol=1e-5, atol=1e-5)
    view.fill_(7.0)
    assert torch.equal(arena, torch.full_like(arena, 7.0))


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    one = Case.draw(30, 1, 24, 16)
    narrow = [operand.bfloat16() for operand in (one.x, one.b, one.c)]
    x, b, c = narrow
    y, _, _ = fast.chunk(x, one.dt, one.a, b, c, query_lens=[30], initial=one.initial)
    x, b, c = (operand.float() for operand in narrow)
    truth, _, _ = naive.chunk(x, one.dt, one.a, b, c, query_lens=[30], initial=one.initial)
    torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5)
