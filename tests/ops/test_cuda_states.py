"""The kernels of the CUDA column that move states against `naive.py`, in Triton's interpreter.

All that an operator has no business with is NaN: the rest of the wide product its rows are slices
of, the numbers between two units, other units, exports' units before they are written, and the rows
of padding. So what is read too much shows in the results, and what is written too much in the pool.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.support import interpreter
from engine.forward import StateExport, StateIndex
from engine.ops.causal_conv1d import naive as naive_conv
from engine.ops.causal_conv1d.cuda import causal_conv1d
from engine.ops.gated_delta_rule import naive as naive_delta
from engine.ops.gated_delta_rule.cuda import gated_delta_rule, rates
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.selective_scan import naive as naive_scan
from engine.ops.selective_scan.cuda import selective_scan
from engine.ops.ssd import naive as naive_ssd
from engine.ops.ssd.cuda import ssd
from engine.ops.ssd.parameters import SSDParameters
from tests.ops.batches import GAP, NUM_UNITS, Batch, Chunk, moved
from tests.tiers import l_shape

NAN = float("nan")
EXPORTS = (StateExport(1, 2, 0), StateExport(1, 3, 11), StateExport(2, 3, 6))
LONG_EXPORTS = (StateExport(0, 64, 0), StateExport(1, 65, 11), StateExport(1, 129, 6))
BATCHES = {
    "padded decodes": Batch(5, [1] * 5, [4, -1, 9, 3, -1]),
    "padding": Batch(2, [1] * 2, [-1, -1]),
    "mixed": Batch(3, [1, 1, 1, 2, 5, 3], [8, -1, 7, 3, 10, 1], EXPORTS),
    "long segment": Batch(1, [1, 70], [10, 5], (StateExport(0, 66, 11),)),
    "long segments": Batch(1, [1, 67, 130, 3], [10, 5, 1, 8], LONG_EXPORTS),
}
EACH = [name for name in BATCHES if name != "long segment"]  # "long segments" is the last


@pytest.fixture(autouse=True)
def fla_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.patch(partial(monkeypatch.setattr, raising=False))


@dataclass(slots=True, frozen=True)
class Rows:
    """Slices of one product, apart from each other, of the sequences of a batch."""

    batch: Batch
    parts: list[Tensor]

    @classmethod
    def draw(cls, batch: Batch, shapes: list[tuple[int, ...]], seed: int = 0) -> "Rows":
        draw = torch.Generator().manual_seed(seed)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        wide = torch.full((batch.tokens, sum(sizes) + 3 * len(sizes)), NAN)
        parts, first = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            part = wide[:, first + 3 : first + 3 + size]
            part.copy_(torch.randn(part.shape, generator=draw))
            parts.append(part.view(-1, *shape))
            first += size + 3
        for row, unit in enumerate(batch.units[: batch.decodes]):
            if unit < 0:
                wide[row] = NAN
        return cls(batch, parts)

    def kept(self) -> "Rows":
        """Without padding."""
        batch = self.batch
        real = [row for row in range(batch.tokens) if row >= batch.decodes or batch.units[row] >= 0]
        decodes = sum(row < batch.decodes for row in real)
        pads = batch.decodes - decodes
        units = [unit for unit in batch.units if unit >= 0]
        kept = replace(batch, decodes=decodes, lens=batch.lens[pads:], units=units)
        return Rows(kept, [part[real] for part in self.parts])

    def pool(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """States of the batch's units; all others, and what is between them, are NaN.

        And all of the memory: before unit 0 there is room for one, which is the last seen from -1.
        """
        size = torch.Size(shape).numel() + GAP
        draw = torch.Generator().manual_seed(3)
        drawn = torch.randn(1 + NUM_UNITS, size, generator=draw)
        memory = torch.full_like(drawn, NAN)
        for unit in self.batch.units:
            if unit >= 0:
                memory[1 + unit, :-GAP] = drawn[1 + unit, :-GAP]
        return memory[1:, :-GAP].view(NUM_UNITS, *shape), memory


def check(
    rows: Rows,
    shape: tuple[int, ...],
    op: Callable[..., Tensor],
    truth: Callable[[list[Tensor]], Chunk],
    *,
    limit: float = 5e-6,
) -> None:
    """`op` moves a batch as `naive.py` does, to `limit`."""
    (ours, memory), (theirs, other) = rows.pool(shape), rows.pool(shape)
    found = op(*rows.parts, ours, rows.batch.index())
    kept = rows.kept()
    if kept.batch.tokens:
        wanted = moved(theirs, kept.batch, truth(kept.parts))
        at = torch.tensor([unit >= 0 for unit in rows.batch.units[: rows.batch.decodes]])
        pads = torch.cat([~at.bool(), torch.zeros(rows.batch.tokens - len(at), dtype=torch.bool)])
        close(found[~pads], wanted, limit)
        assert not found[pads].any()
    else:
        assert not found.any()
    close(memory, other, limit)


def close(ours: Tensor, truth: Tensor, limit: float) -> None:
    """Beside a number or their root mean square: some are small sums of large ones."""
    assert torch.equal(ours.isnan(), truth.isnan())
    usual = truth[~truth.isnan()].square().mean().sqrt()
    error = ((ours - truth).abs() / truth.abs().clamp(min=usual)).nan_to_num()
    assert error.max() <= limit, error.max()


@pytest.mark.parametrize(
    ("batch", "taps", "channels", "silu"),
    l_shape(EACH, (4, 2, 3), (35, 300), (True, False), corner=("mixed", 4, 35, True)),
)
def test_convolution(batch: str, taps: int, channels: int, silu: bool) -> None:
    rows = Rows.draw(BATCHES[batch], [(channels,)])
    weight, bias = torch.randn(taps, channels), torch.randn(channels) if silu else None
    check(
        rows,
        (taps - 1, channels),
        lambda x, pool, index: causal_conv1d(x, pool, index, weight, bias, silu=silu),
        lambda kept: (
            lambda lens, states, exports: naive_conv.conv_chunk(
                kept[0], lens, states, weight, bias, exports=exports, silu=silu
            )
        ),
    )


@pytest.mark.parametrize(
    ("batch", "dims", "by_channel"),
    [
        ("padded decodes", (6, 10), False),
        ("padded decodes", (37, 70), True),
        ("padding", (6, 10), False),
        ("mixed", (6, 10), False),
        ("mixed", (16, 24), False),
        pytest.param("mixed", (17, 37), True, marks=pytest.mark.long),
        pytest.param("long segments", (37, 70), False, marks=pytest.mark.long),
        pytest.param("long segment", (16, 24), True, marks=pytest.mark.long),
    ],
)
def test_gated_delta_rule(batch: str, dims: tuple[int, int], by_channel: bool) -> None:
    (dk, dv), heads, key_heads = dims, 2, 1
    of_heads: tuple[int, ...] = (heads, dk) if by_channel else (heads,)
    shapes: list[tuple[int, ...]] = [
        (key_heads, dk),
        (key_heads, dk),
        (heads, dv),
        of_heads,
        (heads,),
    ]
    rows = Rows.draw(BATCHES[batch], shapes)
    parameters = DeltaRuleParameters(
        rate=-torch.tensor([1e-3, 3.0]),
        dt_bias=torch.randn(of_heads) * 4.0,
        beta_scale=2.0,
    )

    def truth(kept: list[Tensor]) -> Chunk:
        q, k, v, a, b = kept
        g, beta = naive_delta.rates(a, b, parameters)
        chunk = partial(naive_delta.chunk, q, k, v, g, beta=beta)
        return lambda lens, states, exports: chunk(query_lens=lens, initial=states, exports=exports)

    # Fla's products of decays by channel meet in the middle of 16 tokens.
    op, limit = partial(gated_delta_rule, parameters=parameters), 1e-5 if by_channel else 5e-6
    check(rows, (heads, dk, dv), op, truth, limit=limit)


@pytest.mark.parametrize(
    ("batch", "dims", "groups", "as_in"),
    [
        ("padded decodes", (6, 10), 2, "Mamba2"),
        ("padded decodes", (33, 37), 1, "lightning attention"),
        ("padding", (6, 10), 2, "Mamba2"),
        ("mixed", (6, 10), 2, "Mamba2"),
        ("mixed", (6, 10), 2, "lightning attention"),
        pytest.param("mixed", (33, 37), 2, "lightning attention", marks=pytest.mark.long),
        pytest.param("long segment", (17, 30), 2, "Mamba2", marks=pytest.mark.long),
        pytest.param("long segments", (80, 70), 1, "Mamba2", marks=pytest.mark.long),
        pytest.param("long segments", (16, 140), 2, "lightning attention", marks=pytest.mark.long),
    ],
)
def test_state_space_duality(batch: str, dims: tuple[int, int], groups: int, as_in: str) -> None:
    (dim, size), heads = dims, 4
    rows = Rows.draw(BATCHES[batch], [(heads, dim), (groups, size), (groups, size), (heads,)])
    parameters = SSDParameters(a=-torch.tensor([0.01, 0.5, 2.0, 8.0]))
    if as_in == "Mamba2":
        bias, d = torch.tensor([-9.0, -1.0, 0.0, 25.0]), torch.randn(heads)
        parameters = SSDParameters(a=parameters.a, dt_bias=bias, limits=(1e-4, 9.0), d=d)

    def steps(dt: Tensor) -> Tensor | None:
        return dt if as_in == "Mamba2" else None

    def truth(kept: list[Tensor]) -> Chunk:
        x, b, c, dt = kept
        chunk = partial(naive_ssd.ssd, x, steps(dt), b, c, parameters=parameters)
        return lambda lens, states, exports: chunk(query_lens=lens, initial=states, exports=exports)

    def op(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, pool: Tensor, index: StateIndex) -> Tensor:
        return ssd(x, steps(dt), b, c, pool, index, parameters=parameters)

    check(rows, (heads, dim, size), op, truth)


@pytest.mark.parametrize(
    ("batch", "channels", "size"),
    [
        *l_shape(EACH[:-1], (35, 130), (16, 3), corner=("mixed", 35, 16)),
        pytest.param("long segments", 35, 16, marks=pytest.mark.long),
    ],
)
def test_selective_scan(batch: str, channels: int, size: int) -> None:
    rows = Rows.draw(BATCHES[batch], [(channels,), (channels,), (size,), (size,)])
    rows.parts[1].exp_()
    a = -torch.exp(torch.randn(size, channels) * 2)

    def truth(kept: list[Tensor]) -> Chunk:
        x, dt, b, c = kept
        chunk = partial(naive_scan.chunk, x, dt, a, b, c)
        return lambda lens, states, exports: chunk(query_lens=lens, initial=states, exports=exports)

    def op(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, pool: Tensor, index: StateIndex) -> Tensor:
        return selective_scan(x, dt, a, b, c, pool, index)

    check(rows, (size, channels), op, truth)


def test_weak_decays_after_strong_ones_keep_their_digits() -> None:
    """Unbounded, their sums would reach 1e5 in a chunk, where float32 knows steps of 0.01."""
    rows = Rows.draw(Batch(0, [64], [5]), [(1, 16), (1, 16), (1, 16), (1,)])
    rows.parts[3][::2], rows.parts[3][1::2] = 3.0, -9.0
    parameters = SSDParameters(a=-torch.tensor([1000.0]))

    def truth(kept: list[Tensor]) -> Chunk:
        x, b, c, dt = kept
        chunk = partial(naive_ssd.ssd, x, dt, b, c, parameters=parameters)
        return lambda lens, states, exports: chunk(query_lens=lens, initial=states, exports=exports)

    def op(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, pool: Tensor, index: StateIndex) -> Tensor:
        return ssd(x, dt, b, c, pool, index, parameters=parameters)

    check(rows, (1, 16, 16), op, truth, limit=2e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_rates_of_a_gated_delta_rule(by_channel: bool) -> None:
    of_heads = (3, 700) if by_channel else (3,)
    a, b = Rows.draw(Batch(0, [5], [1]), [of_heads, (3,)]).parts
    parameters = DeltaRuleParameters(
        rate=-torch.tensor([1e-3, 1.0, 30.0]), dt_bias=torch.randn(of_heads) * 8.0, beta_scale=2.0
    )
    decay, beta = rates(a, b, parameters)
    exact, rate = naive_delta.rates(a, b, parameters)
    torch.testing.assert_close(beta, rate, rtol=1e-6, atol=0.0)
    # Of a decay that leaves nothing it does not matter how little that is.
    torch.testing.assert_close(decay, exact.clamp(min=-28.0), rtol=2e-6, atol=0.0)
