"""The Triton kernels of a mixture of experts, in the interpreter, against the definition."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from engine.model_configs.feed_forward import Activation, RouterConfig, Scoring
from engine.ops.backend import cuda_ops
from engine.ops.experts import cuda, naive
from engine.ops.experts.cuda import FEW, MANY, SOME, CudaExperts, sort_by_expert, tile_for
from tests.support.host_access import no_host_access


@dataclass(slots=True, frozen=True, kw_only=True)
class Case:
    """Sizes of a mixture: tokens, experts, experts that are chosen at all, choices of a token."""

    tokens: int
    experts: int
    used: int
    top_k: int
    width: int
    inner: int


CASES = {
    "one of each": Case(tokens=1, experts=1, used=1, top_k=1, width=1, inner=1),
    "all on one expert": Case(tokens=70, experts=5, used=1, top_k=1, width=33, inner=65),
    "odd sizes": Case(tokens=7, experts=9, used=5, top_k=3, width=70, inner=35),
    "idle experts": Case(tokens=3, experts=34, used=34, top_k=4, width=20, inner=2),
}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (CASES["one of each"], Activation.RELU2),
        (CASES["all on one expert"], Activation.GELU_TANH),
        (CASES["odd sizes"], Activation.SILU),
        (CASES["idle experts"], Activation.RELU2),
    ],
    ids=CASES.keys(),
)
def test_equals_naive(case: Case, kind: Activation, *, gated: bool) -> None:
    """Also for strided rows. Experts without a token hold NaN: so nobody reads them."""
    draw = torch.Generator().manual_seed(case.tokens)
    x = torch.randn((case.tokens, case.width + 3), generator=draw)[:, : case.width]
    chosen = torch.rand((case.tokens, case.used), generator=draw).argsort(dim=1)[:, : case.top_k]
    # The last of all experts are among the used.
    chosen = case.experts - 1 - chosen
    shares = torch.rand((case.tokens, case.top_k), generator=draw)
    rows = case.inner * (2 if gated else 1)
    up = torch.randn((case.experts, rows, case.width), generator=draw)
    down = torch.randn((case.experts, case.width, case.inner), generator=draw)
    idle = [one for one in range(case.experts) if one not in set(chosen.flatten().tolist())]
    up[idle], down[idle] = torch.nan, torch.nan
    residual = torch.randn((case.tokens, case.width), generator=draw)
    run = CudaExperts(up, down, activation=kind, gated=gated)
    with no_host_access():
        got = run(x, chosen, shares, residual if gated else None)
    expected = naive.experts(x, chosen, shares, up, down, activation=kind, gated=gated)
    if gated:
        expected += residual
    near = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=near)


def dot_in_order(
    _: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_how: object
) -> TensorHandle:
    """NumPy's product adds in an order that depends on the rows; this one only on the inputs."""
    total = np.zeros_like(d.data)
    for place in range(a.data.shape[1]):
        total += a.data[:, place, None] * b.data[place]
    return TensorHandle(total + d.data, d.dtype.scalar)


def test_a_row_depends_on_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: not on the rows beside it, nor on the tile; and another run has the same bits."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_order)
    tokens, width, inner, experts = 260, 70, 24, 2
    draw = torch.Generator().manual_seed(4)
    x = torch.randn((tokens, width), generator=draw)
    chosen = torch.rand((tokens, experts), generator=draw).argsort(dim=1)[:, :2]
    shares = torch.rand((tokens, 2), generator=draw)
    up = torch.randn((experts, 2 * inner, width), generator=draw)
    down = torch.randn((experts, width, inner), generator=draw)
    run = CudaExperts(up, down, activation=Activation.SILU, gated=True)
    together = run(x, chosen, shares)
    assert torch.equal(run(x, chosen, shares), together)
    tiles = {tile_for(2 * tokens, experts)}
    for start, end in [(0, 1), (1, 4), (4, 40)]:
        rows = slice(start, end)
        tiles.add(tile_for(2 * (end - start), experts))
        assert torch.equal(run(x[rows], chosen[rows], shares[rows]), together[rows])
    assert tiles == {FEW, SOME, MANY}
    # A broken row breaks no other.
    x[7] = torch.nan
    broken = run(x, chosen, shares)
    assert broken[7].isnan().all()
    assert torch.equal(broken[8:], together[8:])
    assert torch.equal(broken[:7], together[:7])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "used"),
    [(1, 1, 1, 1), (60, 1, 7, 1), (30, 3, 11, 9), (16, 2, 8, 3), (2, 8, 40, 40)],
    ids=["one", "all on one expert", "many chunks", "full chunks", "more experts than pairs"],
)
def test_pairs_are_sorted_by_expert(
    monkeypatch: pytest.MonkeyPatch, *, tokens: int, top_k: int, experts: int, used: int
) -> None:
    """Stable, and every pair is in exactly one block of its expert; in small pieces, so many."""
    monkeypatch.setattr(cuda, "CHUNK", 16)
    monkeypatch.setattr(cuda, "EXPERTS_AT_ONCE", 4)
    monkeypatch.setattr(cuda, "CHUNKS_AT_ONCE", 2)
    draw = torch.Generator().manual_seed(tokens)
    chosen = torch.rand((tokens, used), generator=draw).argsort(dim=1)[:, :top_k]
    chosen = experts - 1 - chosen
    pairs, blocks = sort_by_expert(chosen.contiguous(), experts, 4)
    slots = chosen.flatten()
    assert torch.equal(pairs.long(), slots.argsort(stable=True))
    end = 0
    for expert, first, rows in blocks.T.tolist():
        if rows == 0:
            continue
        assert first == end
        assert rows <= 4
        assert set(slots[pairs[first : first + rows].long()].tolist()) == {expert}
        end += rows
    assert end == tokens * top_k
    full = sum(-(-count // 4) for count in slots.bincount().tolist())
    assert int((blocks[2] > 0).sum()) == full


def test_the_column_s_router_asks_nothing() -> None:
    config = RouterConfig(
        count=12, top_k=4, scoring=Scoring.SIGMOID, correction_bias=True, groups=4, top_groups=2
    )
    draw = torch.Generator().manual_seed(3)
    matrix = torch.randn((12, 20), generator=draw)
    ops = cuda_ops()
    route = ops.router(config, matrix, torch.randn(12, generator=draw))
    x = torch.randn((9, 20), generator=draw)
    up, down = torch.randn((12, 8, 20), generator=draw), torch.randn((12, 20, 8), generator=draw)
    run = ops.experts(up, down, activation=Activation.RELU2, gated=False)
    with torch.inference_mode(), no_host_access():
        chosen, shares = route(x)
        y: Tensor = run(x, chosen, shares)
    expected = naive.experts(x, chosen, shares, up, down, activation=Activation.RELU2, gated=False)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
