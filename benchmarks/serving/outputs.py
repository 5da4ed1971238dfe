"""Outputs that all serving benchmarks share, beside the table of each.

Percentiles, ratios of targets, a record per request, a timeline, and who failed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from benchmarks.load.loop import Run
from benchmarks.load.reply import Reply
from benchmarks.load.summary import Summary, Times, details
from benchmarks.serving.options import TargetOptions
from benchmarks.support import report
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import Bar, timeline

NOT_TOLD = "not told"
NOTHING_CAME = "error: no request was answered, so that there is no table"
RATIOS: Mapping[str, Callable[[Summary], float | None]] = {
    "TTFT p50": lambda one: one.ttft.median,
    "TPOT": lambda one: one.tpot.mean,
    "tok/s": lambda one: one.output_throughput,
    "hits": lambda one: one.hits,
    "hit tokens of D": lambda one: one.decode_cached_tokens,
    "bytes pulled": lambda one: one.pulled_bytes,
}
TIMES: Mapping[str, Callable[[Reply], Sequence[float]]] = {
    "TTFT": lambda one: (one.ttft,),
    "TPOT": lambda one: (one.tpot,) if one.output_tokens > 1 else (),
    "ITL": lambda one: one.itls,
    "E2EL": lambda one: (one.e2el,),
}


def write(found: report.Report, options: TargetOptions, runs: Mapping[str, Sequence[Run]]) -> None:
    """As far as it is asked for; `runs` by case, one per round."""
    if options.percentiles:
        _publish_percentiles(found, options, runs)
    try:
        if options.save_detailed:
            lines = list(_records(runs))
            Path(options.save_detailed).write_bytes(msgspec.json.Encoder().encode_lines(lines))
        if options.plot_timeline:
            bars = {case: _bars(own[-1]) for case, own in runs.items()}
            timeline(Path(options.plot_timeline), bars)
    except OSError as error:  # what was measured is told all the same
        typer.echo(f"error: {error}", err=True)


def publish_ratios(found: report.Report, runs: Mapping[str, Sequence[Summary]]) -> None:
    """Each target beside the last one, by rounds; nothing of one alone."""
    *others, base = runs
    rows = [
        [f"{name} / {base}", *(_ratio(runs[name], runs[base], of) for of in RATIOS.values())]
        for name in others
    ]
    if rows:
        headers = ("ratio of", *RATIOS)
        found.publish("Targets", headers=headers, rows=rows, note="medians over rounds")


def tell_failures(summaries: Mapping[str, Sequence[Summary]]) -> bool:
    """Says who failed how many requests; False, with an error, if nobody answered any."""
    for line in filter(None, (failure(name, own) for name, own in summaries.items())):
        typer.echo(line, err=True)
    came = any(one.completed for own in summaries.values() for one in own)
    if not came:
        typer.echo(NOTHING_CAME, err=True)
    return came


def failure(name: str, runs: Sequence[Summary]) -> str:
    """How many requests failed, and the first error; empty if none did."""
    failed = sum(run.failed for run in runs)
    if not failed:
        return ""
    of = failed + sum(run.completed for run in runs)
    error = next(run.errors[0] for run in runs if run.failed)
    return f"{name}: {failed} of {of} requests failed: {error}"


def _records(runs: Mapping[str, Sequence[Run]]) -> Iterator[dict[str, Any]]:
    for case, own in runs.items():
        for number, run in enumerate(own):
            yield from ({"case": case, "round": number, **one} for one in details(run))


def _publish_percentiles(
    found: report.Report, options: TargetOptions, runs: Mapping[str, Sequence[Run]]
) -> None:
    rows, names = [], []
    for case, own in runs.items():
        answered = [reply for run in own for reply in run.replies if not reply.error]
        for name, seconds in TIMES.items():
            times = Times.of([each for one in answered for each in seconds(one)], options.ranks())
            names = list(times.percentiles)
            cells = (f"{ms:.1f}" for ms in (times.mean, *times.percentiles.values()))
            rows.append([f"{case}, {name}", *cells])
    found.publish(
        "Percentiles", headers=("case", "mean", *names), rows=rows, note="ms, all rounds together"
    )


def _ratio(
    above: Sequence[Summary], below: Sequence[Summary], of: Callable[[Summary], float | None]
) -> str:
    pairs = [
        (of(one), of(other))
        for one, other in zip(above, below, strict=True)
        if one.completed and other.completed
    ]
    told = [(one, other) for one, other in pairs if one is not None and other is not None]
    ratios = [one / other for one, other in told if other]
    if ratios:
        return Spread.of(ratios).show()
    return "none" if told or not pairs else NOT_TOLD


def _bars(run: Run) -> list[Bar]:
    """Seconds since the first request was due; one that failed has no token that counts."""
    begun = min(reply.due for reply in run.replies)
    return [
        Bar(
            reply.due - begun,
            reply.sent - begun,
            None if reply.error else reply.chunks[0] - begun,
            reply.ended - begun if reply.error else reply.chunks[-1] - begun,
        )
        for reply in sorted(run.replies, key=lambda reply: reply.due)
    ]
