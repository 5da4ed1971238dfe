"""Rows, headlines and the plot of a sweep."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.load.agreement import Agreement
from benchmarks.load.summary import Summary
from benchmarks.serving.outputs import failure
from benchmarks.serving.points import Measured, Point, Rounds
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import curves

HEADERS = (
    "case",
    "TTFT ms p50",
    "p99",
    "TPOT ms",
    "ITL ms p99",
    "tok/s",
    "tok/s, ratio",
    "good requests/s",
    "failed",
)


class Row(msgspec.Struct, frozen=True):
    """One target at one point. Milliseconds; spreads and medians over rounds.

    `ratio` is of this target's output tokens per second to the last target's, by round.
    """

    target: str
    point: str
    ttft: Spread
    ttft_p99: float
    tpot: Spread
    itl_p99: float
    throughput: Spread
    ratio: Spread
    per_core: float
    per_user: float
    goodput: Spread
    hits: float | None
    failed: int
    requests: int

    def cells(self) -> list[str]:
        """A line of the table."""
        return [
            f"{self.target}, {self.point}{', INCOMPLETE' if self.failed else ''}",
            self.ttft.show(0),
            f"{self.ttft_p99:.0f}",
            self.tpot.show(1),
            f"{self.itl_p99:.1f}",
            self.throughput.show(0),
            self.ratio.show(),
            self.goodput.show(1),
            f"{self.failed} of {self.requests}" if self.failed else "0",
        ]


def rows_of(point: Point, rounds: Rounds) -> list[Row]:
    """A row per target that answered anything."""
    base = [one.summary for one in list(rounds.values())[-1]]
    return [
        _row(name, point, own, base=base)
        for name, own in rounds.items()
        if any(one.summary.completed for one in own)
    ]


def failures(point: Point, rounds: Rounds) -> list[str]:
    """A line per target that failed requests, with its first error."""
    lines = (
        failure(f"{name}, {point.name}", [one.summary for one in own])
        for name, own in rounds.items()
    )
    return list(filter(None, lines))


def agreement_of(points: Sequence[Rounds]) -> dict[str, Agreement]:
    """Of each target over all points and rounds."""
    found: dict[str, Agreement] = {}
    for rounds in points:
        for name, own in rounds.items():
            for one in own:
                found[name] = found.get(name, Agreement()).plus(one.agreement)
    return found


def draw(file: Path, rows: Sequence[Row]) -> None:
    """The Pareto plot: output tokens per second and core, by those that one user sees."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row.target, []).append((row.per_user, row.per_core))
    curves(
        file,
        {"right and up is better": {name: sorted(points) for name, points in lines.items()}},
        xlabel="tokens/s per user (1 / TPOT)",
        ylabel="output tokens/s per core",
    )


def _row(name: str, point: Point, own: Sequence[Measured], *, base: Sequence[Summary]) -> Row:
    runs = [one.summary for one in own]
    # A run without any answer has no latency: its zeros would look like the best one.
    answered = [run for run in runs if run.completed]
    speeds = [run.output_throughput for run in runs]
    told = [run.hits for run in runs if run.hits is not None]
    # A round in which nothing came has no ratio.
    ratios = [
        speed / other.output_throughput
        for speed, other in zip(speeds, base, strict=True)
        if other.output_tokens
    ]
    return Row(
        target=name,
        point=point.name,
        ttft=Spread.of([run.ttft.median for run in answered]),
        ttft_p99=_median(answered, lambda run: run.ttft.p99),
        tpot=Spread.of([run.tpot.mean for run in answered]),
        itl_p99=_median(answered, lambda run: run.itl.p99),
        throughput=Spread.of(speeds),
        ratio=Spread.of(ratios or [0.0]),
        per_core=statistics.median(speeds) / own[0].result["cores"],
        per_user=_median(answered, lambda run: run.tokens_per_s_per_user),
        goodput=Spread.of([run.good / run.seconds for run in runs]),
        hits=statistics.median(told) if told else None,
        failed=sum(run.failed for run in runs),
        requests=sum(run.failed + run.completed for run in runs),
    )


def _median(runs: Sequence[Summary], value: Callable[[Summary], float]) -> float:
    return statistics.median(map(value, runs))
