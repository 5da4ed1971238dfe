"""Reports that a benchmark makes of its measurements: a file, one whole page, ratios, lines."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.hand_over.__main__ import main as hand_over
from benchmarks.hand_over.breakeven.__main__ import main as breakeven
from benchmarks.hand_over.breakeven.lines import Lines, Point
from benchmarks.hand_over.breakeven.paper import LONGEST, Model
from benchmarks.hand_over.overlap import ALONE, BOTH, PULLS, Window, overlap_of
from benchmarks.hand_over.transfer.__main__ import main as transfer
from benchmarks.serving.colocated import main as colocated
from benchmarks.serving.pauses import main as pauses
from benchmarks.serving.proxy_cost.__main__ import main as proxy_cost
from benchmarks.serving.proxy_cost.members import main as members
from benchmarks.support import pairs, report, report_page
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars

FLOPS = 445e12
# Of a replication of the same arithmetic: tokens at 25 GB/s with 20 ms, and with 1 ms, fixed.
KNOWN = {"Qwen3.5-4B": (1311, 184), "Nemotron-H-8B": (686, 145), "Granite-4.0-H-Tiny": (5176, 787)}
HOSTILE = '<script>alert("1")</script>'


def run_one(folder: Path, name: str = "one", title: str = "Speeds") -> report.Results:
    found = report.Report(name, folder, (60, 6), cpu="all", quick=True)
    found.publish(title, headers=("case", "ms"), rows=[["a", "1.5"], [HOSTILE, "2"]], note="n & m")
    grouped_bars(found.plot(), ["a"], {"x": [Spread(1.0, 0.5, 1.5)]}, ylabel="ms")
    found.save({"rows": [Spread(1.0, 0.5, 1.5)]})
    return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=report.Results)


def test_the_file_says_what_was_printed_where_and_when(tmp_path: Path) -> None:
    results = run_one(tmp_path)
    assert results.tables[0].rows[0] == ("a", "1.5")
    assert results.quick and results.seconds < 6
    assert results.machine.cores >= 1 and re.match(r"\d{4}-\d\d-\d\dT", results.date)
    assert results.data == {"rows": [{"median": 1.0, "low": 0.5, "high": 1.5}]}
    assert [(tmp_path / plot).is_file() for plot in results.plots] == [True]


def test_the_page_needs_no_other_file_and_escapes_what_it_shows(tmp_path: Path) -> None:
    run_one(tmp_path), run_one(tmp_path, "two", "Hits")
    text = report_page.page(report_page.read(tmp_path), tmp_path)
    assert text.count("data:image/png;base64,") == 2
    assert not re.search(r"(?:src|href)=\"(?!data:|#)|@import|url\(", text)
    assert HOSTILE not in text and "&lt;script&gt;" in text and "n &amp; m" in text
    assert text.index("Speeds") < text.index("Hits")
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize(
    "app",
    [hand_over, breakeven, transfer, colocated, members, pauses, proxy_cost],
    ids=lambda it: it.__module__,
)
def test_who_starts_its_own_servers_says_that_it_takes_no_target(
    app: Callable[..., None], tmp_path: Path
) -> None:
    made = typer.Typer()
    made.command()(app)
    words = ["--quick", "--out", str(tmp_path), "--target", "on=http://one"]
    done = CliRunner().invoke(made, words)
    assert (done.exit_code, done.stderr, done.stdout) == (2, f"{report.NO_TARGET}\n", "")


def test_rounds_end_in_time_but_one_is_always_made() -> None:
    ways = {"a": lambda: 1, "b": lambda: 2}
    assert pairs.alternate(ways, 5, until=0.0, done=lambda: None) == {"a": [1], "b": [2]}
    assert pairs.alternate(ways, 3, done=lambda: None) == {"a": [1] * 3, "b": [2] * 3}


@pytest.mark.parametrize(("rounds", "warmups", "turns"), [(1, 2, 1), (2, 2, 4), (3, 0, 3)])
def test_only_one_round_alone_has_no_warm_up(rounds: int, warmups: int, turns: int) -> None:
    runs: list[int] = []
    ways = {"a": lambda: runs.append(0)}
    found = pairs.alternate(ways, rounds, warmups=warmups, done=lambda: None)
    assert len(found["a"]) == rounds and len(runs) == turns == pairs.turns(rounds, warmups)


def test_rounds_without_a_step_beside_a_read_have_no_overlap() -> None:
    """Their reads count; the ratios with steps are of the other rounds, or there are none."""
    alone, pulls = Window((0.01, 0.02, 0.01)), Window((), (0.1,), 64)
    beside, missed = Window((0.03,), (0.2,), 64), Window((), (0.4,), 64)
    some = overlap_of("shm", {ALONE: [alone] * 2, PULLS: [pulls] * 2, BOTH: [missed, beside]})
    assert some.overlapped == 1 and some.step_ratio == Spread.of([0.03 / 0.01])
    assert some.pull_ratio == Spread.of([0.4 / 0.1, 0.2 / 0.1])
    none = overlap_of("shm", {ALONE: [alone], PULLS: [pulls], BOTH: [missed]})
    assert (none.overlapped, none.step_ratio, none.serial_ratio) == (0, None, None)


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
