"""The grouped experts against those of one token and one expert at a time; and who is chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model_configs.feed_forward import Activation, RouterConfig, Scoring
from engine.ops.backend import MakeMixture, MakeRouter, Mixture, Router
from engine.ops.experts import naive
from engine.ops.experts.fast import TorchExperts
from engine.ops.experts.native import NativeExperts
from engine.ops.router.fast import TorchRouter
from engine.ops.router.native import NativeRouter
from tests.ops.native import native_kernels


def native(up: Tensor, down: Tensor, *, activation: Activation, gated: bool) -> Mixture:
    return NativeExperts(native_kernels(up.dtype), up, down, activation=activation, gated=gated)


def native_router(config: RouterConfig, matrix: Tensor, correction: Tensor | None) -> Router:
    return NativeRouter(native_kernels(), config, matrix, correction)


@pytest.mark.parametrize("make", [TorchExperts, native])
@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 9),
    # 16 bytes are four of them: in odd sizes torch takes the loop over experts.
    width=st.sampled_from([2, 4, 6, 20, 70]),
    inner=st.sampled_from([2, 4, 18, 36]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_grouped_equals_naive(
    *,
    make: MakeMixture,
    tokens: int,
    experts: int,
    width: int,
    inner: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, experts))
    # Few experts are chosen at all in some examples, so that there are groups without a row.
    used = data.draw(st.integers(top_k, experts))
    kind, gated = data.draw(st.sampled_from(Activation)), data.draw(st.booleans())
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn((tokens, width), generator=draw).to(dtype)
    chosen = torch.rand((tokens, used), generator=draw).argsort(dim=1)[:, :top_k]
    shares = torch.rand((tokens, top_k), generator=draw)
    up = torch.randn((experts, inner * (2 if gated else 1), width), generator=draw).to(dtype)
    down = torch.randn((experts, width, inner), generator=draw).to(dtype)
    residual = torch.randn((tokens, width), generator=draw).to(dtype)
    added = residual if data.draw(st.booleans()) else None
    got = make(up, down, activation=kind, gated=gated)(x, chosen, shares, added)
    expected = naive.experts(x, chosen, shares, up, down, activation=kind, gated=gated)
    if added is not None:
        expected += added.float()
    assert got.dtype == dtype
    # Products of bfloat16 are rounded to it, in another order of sums.
    near = (1e-5 if dtype == torch.float32 else 0.03) * float(expected.abs().max())
    torch.testing.assert_close(got.float(), expected, rtol=1e-4, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_row_depends_on_itself_only(dtype: torch.dtype) -> None:
    """Bit by bit: not on the rows it is computed with, in several blocks, nor on the threads."""
    tokens, width, inner = 90, 3000, 40
    draw = torch.Generator().manual_seed(4)
    x = torch.randn((tokens, width), generator=draw).to(dtype)
    chosen = torch.rand((tokens, 4), generator=draw).argsort(dim=1)[:, :3]
    shares = torch.rand((tokens, 3), generator=draw)
    up = (torch.randn((4, 2 * inner, width), generator=draw) * width**-0.5).to(dtype)
    down = torch.randn((4, width, inner), generator=draw).to(dtype)
    together = native(up, down, activation=Activation.SILU, gated=True)(x, chosen, shares)
    kernels = native_kernels(dtype)
    kernels.threads = 3 - kernels.threads
    run = NativeExperts(kernels, up, down, activation=Activation.SILU, gated=True)
    for start, end in [(0, 1), (1, 4), (4, 30), (30, 90)]:
        rows = slice(start, end)
        assert torch.equal(run(x[rows], chosen[rows], shares[rows]), together[rows])
    expected = naive.experts(x, chosen, shares, up, down, activation=Activation.SILU, gated=True)
    near = (1e-5 if dtype == torch.float32 else 0.01) * float(expected.abs().max())
    torch.testing.assert_close(together.float(), expected, rtol=1e-4, atol=near)


class TestRouter:
    """Against the definition, token by token, in plain Python."""

    @pytest.mark.parametrize(
        "config",
        [
            RouterConfig(count=5, top_k=2),
            RouterConfig(count=7, top_k=3, renormalise=False, scale=0.5),
            RouterConfig(count=6, top_k=2, scoring=Scoring.SIGMOID, floor=0.25),
            RouterConfig(
                count=12,
                top_k=4,
                scoring=Scoring.SIGMOID,
                correction_bias=True,
                groups=4,
                top_groups=2,
                scale=2.5,
            ),
        ],
        ids=["softmax", "as-scored", "sigmoid", "groups"],
    )
    @pytest.mark.parametrize("make", [TorchRouter, native_router])
    def test_choice_and_shares(self, make: MakeRouter, config: RouterConfig) -> None:
        draw = torch.Generator().manual_seed(3)
        logits = torch.randn((50, config.count), generator=draw)
        bias = torch.randn(config.count, generator=draw)
        correction = bias if config.correction_bias else None
        router = make(config, torch.eye(config.count), correction)
        for row, own, shares in zip(logits, *router(logits), strict=True):
            self.check(config, row, bias, dict(zip(own.tolist(), shares.tolist(), strict=True)))

    def check(
        self, config: RouterConfig, logits: Tensor, bias: Tensor, got: dict[int, float]
    ) -> None:
        is_softmax = config.scoring is Scoring.SOFTMAX
        scores = (logits.softmax(-1) if is_softmax else logits.sigmoid()).tolist()
        corrections = bias.tolist() if config.correction_bias else [0.0] * config.count
        judged = [score + own for score, own in zip(scores, corrections, strict=True)]
        size = config.count // config.groups
        groups = [range(start, start + size) for start in range(0, config.count, size)]
        groups.sort(key=lambda group: -sum(sorted(judged[e] for e in group)[-2:]))
        open_to = [expert for group in groups[: config.top_groups] for expert in group]
        best = sorted(open_to, key=lambda expert: -judged[expert])[: config.top_k]
        total = sum(scores[e] for e in best) + config.floor if config.renormalise else 1.0
        assert got == pytest.approx({e: config.scale * scores[e] / total for e in best})

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_native_scores_are_those_of_the_matrix(self, dtype: torch.dtype) -> None:
        """More experts than a tile has, and sizes that fill no vector."""
        config = RouterConfig(count=150, top_k=5)
        draw = torch.Generator().manual_seed(5)
        x = torch.randn((20, 37), generator=draw).to(dtype)
        matrix = torch.randn((150, 37), generator=draw)
        chosen, shares = NativeRouter(native_kernels(dtype), config, matrix, None)(x)
        expected, their_shares = TorchRouter(config, matrix, None)(x)
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(shares, their_shares)

    def test_experts_of_broken_rows_exist(self) -> None:
        """A row of NaN or infinity still names experts: its tokens fail, and no other's."""
        config = RouterConfig(count=6, top_k=3, scoring=Scoring.SIGMOID, groups=3, top_groups=2)
        x = torch.tensor([[torch.nan] * 6, [torch.inf] * 6, [-torch.inf] * 6])
        chosen, _ = NativeRouter(native_kernels(), config, torch.eye(6), None)(x)
        assert chosen.min() >= 0
        assert chosen.max() < 6
