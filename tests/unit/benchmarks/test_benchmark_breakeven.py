"""From which prompt length on PD pays: on paper, and between two lines."""

import pytest

from benchmarks.hand_over.breakeven.lines import Lines, Point
from benchmarks.hand_over.breakeven.paper import LONGEST, Model
from benchmarks.support.pairs import Spread

FLOPS = 445e12
# Of a replication of the same arithmetic: tokens at 25 GB/s with 20 ms, and with 1 ms, fixed.
KNOWN = {"Qwen3.5-4B": (1311, 184), "Nemotron-H-8B": (686, 145), "Granite-4.0-H-Tiny": (5176, 787)}


@pytest.mark.parametrize("name", KNOWN)
def test_the_paper_agrees_with_known_figures(name: str) -> None:
    found = [
        Model.read(name).breakeven(25e9, fixed_s=fixed, flops=FLOPS) for fixed in (0.02, 0.001)
    ]
    assert found == [pytest.approx(tokens, rel=0.03) for tokens in KNOWN[name]]


def test_the_break_even_is_the_first_length_that_pays() -> None:
    model = Model.read("Qwen3.5-4B")
    tokens = model.breakeven(1.25e9, fixed_s=0.02, flops=FLOPS)
    assert tokens is not None and 1 < tokens < LONGEST
    gains = [
        model.prefill_s(n, FLOPS) - model.path_s(n, 1.25e9, 0.02) for n in (tokens - 1, tokens)
    ]
    assert gains[0] < 0 <= gains[1]
    assert model.breakeven(1e3, fixed_s=0.02, flops=FLOPS) is None


def lines(*points: tuple[int, float, float]) -> Lines:
    return Lines.of(
        [
            Point(
                tokens, Spread.of([prefill]), Spread.of([path]), Spread.of([prefill / path]), 1, 1
            )
            for tokens, prefill, path in points
        ]
    )


def test_the_lines_cross_between_two_points() -> None:
    crossing = lines((100, 10.0, 20.0), (200, 20.0, 22.0), (400, 40.0, 26.0))
    assert crossing.breakeven() == pytest.approx(200 + 200 * 2 / 16)
    assert crossing.prefill_us_per_token == pytest.approx(100)
    assert crossing.path_us_per_token == pytest.approx(20)
    assert crossing.path_fixed_ms == pytest.approx(18)
    assert lines((100, 10.0, 1.0), (200, 20.0, 2.0)).breakeven() == 0
    assert lines((100, 1.0, 10.0), (200, 2.0, 20.0)).breakeven() is None
