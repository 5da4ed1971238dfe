"""`python -m benchmarks.serving.replay G1` or `TRACE.jsonl`: a request trace against a cluster.

A generated workload or a file in Mooncake's or Azure's format is scaled in time and in length, and
sent to an own cluster of P, D and proxy, or to each `--target` in turn. First comes the ideal: the
share of the prompt tokens, of exactly the requests that are sent, that some earlier prompt began
with. Then come the hits that the server tells of, which may exceed it: a server may find its
answers, too. A server that does not tell has no share.

Turns of a session wait for the answer before them and think as long as the trace says; `--stamps`
sends every request at its own time instead, which makes the tail of a server that is behind worse.
Prompts are token ids, of `--tokenizer` or below 256 for a target; equal segments of a trace become
equal ids. The greedy answers are compared with those of the own decode node, or of `--reference`,
asked one at a time while there is time: if more than near-ties differ, there is no table, and the
status is 1. Requests that fail are counted; if all do, the status is 1 too.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Meta

from benchmarks.load.agreement import Agreement, check_runs, tell
from benchmarks.load.client import TargetError
from benchmarks.load.loop import OWN_TIMES, Pace, Run, drive
from benchmarks.load.request import Request, salted
from benchmarks.load.summary import Summary, result
from benchmarks.serving import outputs
from benchmarks.serving.loads import ids_of, sampled
from benchmarks.serving.options import TargetOptions
from benchmarks.serving.outputs import NOT_TOLD, publish_ratios, tell_failures
from benchmarks.serving.targets import Target, cached_targets_of
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars
from benchmarks.workloads.catalogue import WORKLOADS
from benchmarks.workloads.files import read_trace
from benchmarks.workloads.traces import (
    Record,
    TraceError,
    arrivals,
    ideal_hits,
    requests_of,
)
from engine.errors import ConfigError
from serving.cli import command_app

PURPOSE = "Hits and times of a trace, beside the hits that are possible."
QUICK_S = 120.0
SPAN_S, QUICK_SPAN_S = 60.0, 3.0
REQUESTS, QUICK_REQUESTS = 60, 6
LONGEST, QUICK_LONGEST = 4096, 256
MOST_OUTPUT, QUICK_OUTPUT = 64, 8
THINNED = 0.03
RESERVE_S = 15.0
# The rest is for the reference, which is asked one request at a time.
RUN_SHARE = 0.6
HEADERS = (
    "trace",
    "requests",
    "failed",
    "ideal hits",
    "hits that came",
    "hits of D",
    "TTFT ms p50",
    "p99",
    "TPOT ms p50",
    "tok/s",
)


class ReplayOptions(TargetOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a replay: which trace, and how small."""

    trace: Annotated[
        str,
        Meta(description=f"A file, or {', '.join(WORKLOADS)}.", extra={"argument": True}),
    ] = "G1"
    span: Annotated[float, Meta(ge=0.1, description="Seconds of all arrivals.")] = SPAN_S
    longest: Annotated[int, Meta(ge=1, description="Tokens of the longest prompt.")] = LONGEST
    stamps: Annotated[bool, Meta(description="Each at its own time.")] = False

    def limits(self) -> "Limits":
        """How small the trace becomes."""
        if self.quick:
            return Limits(QUICK_LONGEST, QUICK_OUTPUT, QUICK_SPAN_S)
        return Limits(self.longest, MOST_OUTPUT, self.span)


class Scaled(msgspec.Struct, frozen=True):
    """The requests of a replay, and how they were made smaller."""

    records: tuple[Record, ...]
    time_scale: float
    length_scale: float

    @property
    def ideal(self) -> float:
        """Share of the prompt tokens."""
        return sum(ideal_hits(self.records)) / sum(one.input_length for one in self.records)


class Limits(msgspec.Struct, frozen=True):
    """At most `longest` tokens in and `output` out, and all requests begun within `span_s`."""

    longest: int
    output: int
    span_s: float

    def scale(self, records: Sequence[Record]) -> Scaled:
        """All lengths by one factor, never above 1, and all times by another."""
        length = min(1.0, self.longest / max(one.input_length for one in records))
        last = list(arrivals(records))[-1]
        return Scaled(
            tuple(_shorter(one, length, self.output) for one in records),
            self.span_s / last if last else 1.0,
            length,
        )


def _shorter(record: Record, scale: float, most_output: int) -> Record:
    """Equal segments stay equal: each is scaled by itself, to one token at least."""
    segments = tuple((number, max(1, round(size * scale))) for number, size in record.pieces())
    return msgspec.structs.replace(
        record,
        segments=segments,
        input_length=sum(size for _, size in segments),
        output_length=min(most_output, max(1, round(record.output_length * scale))),
    )


def records_of(options: ReplayOptions) -> list[Record]:
    """The first of a generated workload, thinned, or a whole file. Raises TraceError and OSError.

    `python -m benchmarks.workloads NAME --out FILE` writes other seeds and sizes to files.
    """
    if options.trace in WORKLOADS:
        most = QUICK_REQUESTS if options.quick else REQUESTS
        return WORKLOADS[options.trace].make(THINNED, 0)[:most]
    return read_trace(Path(options.trace))


class Played(msgspec.Struct, frozen=True):
    """One target's run, its figures, and how its answers compare with the reference's."""

    run: Run
    summary: Summary
    result: dict[str, Any]
    agreement: Agreement


async def play(
    options: ReplayOptions,
    requests: Sequence[Request],
    targets: Sequence[Target],
    *,
    reference: Target,
    ends_at: float,
    tell: report.Tell,
) -> dict[str, Played]:
    """All requests to each target in turn, given up in time for some to the reference.

    `ends_at` is monotonic. Raises TargetError.
    """
    async with AsyncExitStack() as stack:
        clients = {
            target.name: await stack.enter_async_context(target.client(options))
            for target in targets
        }
        alone = await stack.enter_async_context(reference.client(options))
        for client in (*clients.values(), alone):
            await client.check(requests[0])
        left_s = RUN_SHARE * (ends_at - monotonic()) / len(clients)
        pace = Pace(rate=OWN_TIMES, deadline_s=max(1.0, left_s))
        runs: dict[str, Run] = {}
        for name, client in clients.items():
            # What an earlier run left in the same caches is no hit of this one.
            load = salted(requests, f"replay {secrets.token_hex(4)}")
            runs[name] = await drive(client.send, load, pace, done=tell(f"replay, {name}"))
        done = tell("the reference")
        agreements = await check_runs(alone, runs, ends_at=ends_at, done=done)
        summaries = {name: Summary.of(run, ranks=options.ranks()) for name, run in runs.items()}
        return {
            name: Played(
                runs[name],
                summary,
                result(summary, pace, target=name, model=clients[name].model),
                agreements[name],
            )
            for name, summary in summaries.items()
        }


def measure(
    found: report.Report, requests: Sequence[Request], options: ReplayOptions
) -> dict[str, Played]:
    """By target. Raises TargetError."""
    ends_at, total = found.ends_at - RESERVE_S, (1 + max(1, len(options.target))) * len(requests)
    with report.progress(found.console, total) as tell, cached_targets_of(options) as up:
        targets, reference, _ = up
        playing = play(options, requests, targets, reference=reference, ends_at=ends_at, tell=tell)
        return asyncio.run(playing)


def publish(
    found: report.Report, trace: str, scaled: Scaled, *, summaries: Mapping[str, Summary]
) -> None:
    """The tables and the plot."""
    note = (
        f"lengths x {scaled.length_scale:.3g}, times x {scaled.time_scale:.3g}; "
        f"{machine.describe(found.host)}"
    )
    cells = [
        [
            f"{trace}, {name}",
            f"{len(scaled.records):,}",
            str(one.failed),
            f"{scaled.ideal:.1%}",
            NOT_TOLD if one.hits is None else f"{one.hits:.1%}",
            NOT_TOLD if one.decode_hits is None else f"{one.decode_hits:.1%}",
            f"{one.ttft.median:.0f}",
            f"{one.ttft.p99:.0f}",
            f"{one.tpot.median:.1f}",
            f"{one.output_throughput:.0f}",
        ]
        for name, one in summaries.items()
        if one.completed
    ]
    found.publish("Replay", headers=HEADERS, rows=cells, note=note)
    publish_ratios(found, {name: [one] for name, one in summaries.items()})
    shares = {"ideal": [Spread.of([100 * scaled.ideal])]}
    for name, one in summaries.items():
        if one.hits is not None:
            shares[name] = [Spread.of([100 * one.hits])]
    grouped_bars(found.plot(), [trace], shares, ylabel="hits, % of the prompt tokens")


def measure_trace(load: Callable[[], ReplayOptions]) -> None:
    """The command; status 1 if answers differ or none comes, 2 if it cannot measure."""
    try:
        options = load()
        limits = (60 * options.minutes, QUICK_S)
        found = report.Report("replay", Path(options.out), limits, cpu="all", quick=options.quick)
        scaled = options.limits().scale(records_of(options))
        share = f"{scaled.ideal:.1%}"
        found.console.print(f"{options.trace}: {len(scaled.records)} requests, ideal hits {share}")
        sent = requests_of(
            scaled.records,
            ids_of(options),
            time_scale=scaled.time_scale,
            stamps=options.stamps,
        )
        played = measure(found, sampled(sent, options), options)
    except (ConfigError, TargetError, TraceError, OSError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    summaries = {name: one.summary for name, one in played.items()}
    agreements = {name: one.agreement for name, one in played.items()}
    holds = tell(found.console, agreements)
    came = tell_failures({name: [one] for name, one in summaries.items()})
    if holds and came:
        publish(found, options.trace, scaled, summaries=summaries)
    outputs.write(found, options, {name: [one.run] for name, one in played.items()})
    scales = {"time_scale": scaled.time_scale, "length_scale": scaled.length_scale}
    results = [one.result for one in played.values()]
    data = {"ideal": scaled.ideal, "agreements": agreements, "results": results}
    found.save({"options": options.without_secrets(), **scales, **data})
    raise typer.Exit(0 if holds and came else 1)


if __name__ == "__main__":
    command_app(ReplayOptions, measure_trace, PURPOSE)()
