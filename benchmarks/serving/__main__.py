"""`python -m benchmarks.serving`: TTFT, ITL, throughput, goodput of any OpenAI-compatible server.

Without `--target` real processes on this machine: a prefill node, a decode node and the proxy, and
beside them one node that does both. With it, the servers named. Runs of the same requests go to
all of them by turns; those that are not asked idle. All requests are greedy, stream, and go on to
full length. Each run has a cache salt of its own: repeated prompts are no hits.

TTFT: from sending a request to its first chunk. TPOT: mean seconds per token after it. ITL: every
gap between two chunks. Throughput: output tokens of the run by its wall time. All of it includes
the client's own work. Answers must equal those of a reference, which is asked one request at a
time; near-ties are counted. If other answers differ, there is no table, and the status is 1.
Sampled answers, and those that the reference did not give, are compared with nothing. A row whose
server failed requests says so and how many, as its figures are of the others only; a point at which
a server answers nothing has no row. If there is no row at all, the status is 1.
"""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import typer
import uvloop

from benchmarks.load.agreement import Agreement, tell
from benchmarks.load.client import TargetError
from benchmarks.serving import outputs
from benchmarks.serving.loads import load_of
from benchmarks.serving.options import ServingOptions
from benchmarks.serving.points import Point, Rounds, Sweep
from benchmarks.serving.rows import HEADERS, Row, agreement_of, draw, failures, rows_of
from benchmarks.serving.targets import targets_of
from benchmarks.support import machine, report
from benchmarks.support.pairs import turns
from benchmarks.support.processes import ctrl_c_later
from engine.errors import ConfigError
from serving.cli import command_app

PURPOSE = "Measure Tandem, or any OpenAI-compatible servers, under closed and open loops."
QUICK_S = 120.0


def run(options: ServingOptions, found: report.Report) -> dict[Point, Rounds]:
    """Every point of the sweep, all targets by turns."""
    points = Point.of(options)
    rounds = 1 if options.quick else options.rounds
    load = load_of(options, max(point.requests for point in points) + options.warmup)
    measured: dict[Point, Rounds] = {}
    with (
        targets_of(options) as (targets, reference),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
        Sweep(options, loop, found.ends_at) as sweep,
    ):
        total = len(points) * len(targets) * turns(rounds)
        with report.progress(found.console, total) as describe:
            describe(f"up to {len(load)} requests to the reference")
            sweep.connect(targets, reference, load)
            for number, point in enumerate(points):
                until, done = found.share(len(points) - number), describe(point.name)
                measured[point] = sweep.measure(point, rounds, until=until, done=done)
    return measured


def measure(load: Callable[[], ServingOptions]) -> None:
    """The command; status 1 if answers differ or none came, 2 if it cannot measure."""
    # SIGTERM ends servers and files as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        options = load()
        seconds = (60 * options.minutes, QUICK_S)
        found = report.Report("serving", Path(options.out), seconds, cpu="all", quick=options.quick)
        measured = run(options, found)
    except (ConfigError, TargetError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    with ctrl_c_later():
        agree = publish(options, found, measured)
    raise typer.Exit(0 if agree else 1)


def publish(options: ServingOptions, found: report.Report, measured: dict[Point, Rounds]) -> bool:
    """Tables, plot and JSON; False if answers differ, or no request was answered.

    With answers that differ, there is only the JSON.
    """
    rows = [row for point, rounds in measured.items() for row in rows_of(point, rounds)]
    failed = [line for point, rounds in measured.items() for line in failures(point, rounds)]
    agreements = agreement_of(list(measured.values()))
    holds = all(agreement.holds for agreement in agreements.values())
    if holds and rows:
        cells = [row.cells() for row in rows]
        found.publish("Serving", headers=HEADERS, rows=cells, note=_note(options, found, measured))
        draw(found.plot(), rows)
    runs = {
        f"{name}, {point.name}": [one.run for one in own]
        for point, rounds in measured.items()
        for name, own in rounds.items()
    }
    outputs.write(found, options, runs)
    tell(found.console, agreements)
    found.save(_data(options, measured, rows, agreements=agreements))
    for line in failed:
        typer.echo(line, err=True)
    if not rows:
        typer.echo(outputs.NOTHING_CAME, err=True)
    return holds and bool(rows)


def _note(options: ServingOptions, found: report.Report, measured: dict[Point, Rounds]) -> str:
    summaries = [
        one.summary for rounds in measured.values() for own in rounds.values() for one in own
    ]
    completed = max(1, sum(summary.completed for summary in summaries))
    taken = sorted({len(own) for rounds in measured.values() for own in rounds.values()})
    return (
        f"about {sum(summary.input_tokens for summary in summaries) / completed:.0f} tokens in, "
        f"{sum(summary.output_tokens for summary in summaries) / completed:.0f} out, "
        f"{'-'.join(map(str, taken))} rounds, {options.warmup} warm-up requests before each run; "
        f"good: {options.objectives().show()}; "
        f"servers on this machine share with the client {machine.describe(found.host)}"
    )


def _data(
    options: ServingOptions,
    measured: dict[Point, Rounds],
    rows: list[Row],
    *,
    agreements: dict[str, Agreement],
) -> dict[str, object]:
    """`results` holds one object per run in the shape of `vllm bench serve --save-result`."""
    results = [
        {**one.result, "point": point.name, "round": number, "agreement": one.agreement}
        for point, rounds in measured.items()
        for own in rounds.values()
        for number, one in enumerate(own)
    ]
    told = options.without_secrets()
    return {"options": told, "rows": rows, "agreements": agreements, "results": results}


if __name__ == "__main__":
    command_app(ServingOptions, measure, PURPOSE)()
