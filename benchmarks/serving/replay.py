"""`python -m benchmarks.serving.replay G1` or `TRACE.jsonl`: a request trace against a cluster.

A generated workload or a file in Mooncake's format is scaled in time and in length, and sent to an
own cluster of P, D and proxy, or to `--target`. First comes the ideal: the share of the prompt
tokens, of exactly the requests that are sent, that some earlier prompt began with. Then come the
hits that the server tells of, which may exceed it: a server may find its answers, too.

Turns of a session wait for the answer before them and think as long as the trace says; `--stamps`
sends every request at its own time instead, which makes the tail of a server that is behind worse.
Prompts are token ids, of `--tokenizer` or below 256 for a target; equal segments of a trace become
equal ids. The greedy answers are compared
with those of the own decode node, or of `--reference`, asked one at a time while there is time: if
more than near-ties differ, there is no table, and the status is 1.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated

import msgspec
import typer
from msgspec import Meta

from benchmarks.load.agreement import Agreement, check_run, tell
from benchmarks.load.client import Client, TargetError
from benchmarks.load.loop import OWN_TIMES, Pace, Run, drive
from benchmarks.load.request import Request
from benchmarks.load.summary import Summary, result
from benchmarks.serving.loads import vocabulary_of
from benchmarks.support import machine, report
from benchmarks.support.cluster import cluster
from benchmarks.support.models import SHARED, WIDE, save_random
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars
from benchmarks.workloads.catalogue import WORKLOADS
from benchmarks.workloads.files import read_trace
from benchmarks.workloads.traces import (
    SAFE_IDS,
    Record,
    TraceError,
    arrivals,
    ideal_hits,
    requests_of,
)
from engine.errors import ConfigError
from serving.cli import command_app
from serving.config import Config

PURPOSE = "Hits and times of a trace, beside the hits that are possible."
SECONDS = (480, 60)
SPAN_S, QUICK_SPAN_S = 60.0, 3.0
REQUESTS, QUICK_REQUESTS = 60, 6
LONGEST, QUICK_LONGEST = 4096, 256
MOST_OUTPUT, QUICK_OUTPUT = 64, 8
THINNED = 0.03
ARENA_BYTES = 1 << 30
RESERVE_S = 15.0
# The rest is for the reference, which is asked one request at a time.
RUN_SHARE = 0.6
NOT_TOLD = "not told"
HEADERS = (
    "trace",
    "requests",
    "failed",
    "ideal hits",
    "hits that came",
    "TTFT ms p50",
    "p99",
    "TPOT ms p50",
    "tok/s",
)


class ReplayOptions(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a replay: which trace, how small, and where."""

    trace: Annotated[
        str,
        Meta(description=f"A file, or {', '.join(WORKLOADS)}.", extra={"argument": True}),
    ] = "G1"
    target: Annotated[str, Meta(description="A base URL instead of an own cluster.")] = ""
    reference: Annotated[
        str, Meta(description="The base URL that answers must equal. Default: the target.")
    ] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="A folder with a tokenizer.json: prompts are ids of it. Without, a target "
            "gets ids below 256, which are in every vocabulary."
        ),
    ] = ""
    span: Annotated[float, Meta(ge=0.1, description="Seconds of all arrivals.")] = SPAN_S
    longest: Annotated[int, Meta(ge=1, description="Tokens of the longest prompt.")] = LONGEST
    stamps: Annotated[bool, Meta(description="Each at its own time.")] = False
    quick: Annotated[
        bool, Meta(description="Small and short: shows that it runs, measures little.")
    ] = False
    out: Annotated[str, Meta(description="The folder for its JSON and plots.")] = str(
        report.RESULTS
    )

    def check(self) -> None:
        """Raises ConfigError for a reference without a target."""
        if self.reference and not self.target:
            raise ConfigError("--reference is for --target; an own cluster has its decode node")

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


def ids_of(options: ReplayOptions) -> Sequence[int]:
    """Token ids of prompts; the own cluster's model knows all of its own. Raises ConfigError."""
    if options.tokenizer:
        return vocabulary_of(options.tokenizer)
    return SAFE_IDS if options.target else range(2, SHARED["vocab_size"])


def records_of(options: ReplayOptions) -> list[Record]:
    """The first of a generated workload, thinned, or a whole file. Raises TraceError and OSError.

    `python -m benchmarks.workloads NAME --out FILE` writes other seeds and sizes to files.
    """
    if options.trace in WORKLOADS:
        most = QUICK_REQUESTS if options.quick else REQUESTS
        return WORKLOADS[options.trace].make(THINNED, 0)[:most]
    return read_trace(Path(options.trace))


class Targets(msgspec.Struct, frozen=True):
    """The base URL that is measured, and the one whose answers it must give."""

    url: str
    reference: str


@contextmanager
def targets_of(options: ReplayOptions) -> Iterator[Targets]:
    """The targets given, or an own cluster and its decode node, which end with the block."""
    if options.target:
        yield Targets(options.target, options.reference or options.target)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_random(WIDE, Path(folder))
        with cluster(checkpoint, "--kv-cache-memory-bytes", str(ARENA_BYTES)) as up:
            yield Targets(up.proxy, up.decode[0])


class Played(msgspec.Struct, frozen=True):
    """A finished run, how it was sent, and how its answers compare with the reference's."""

    run: Run
    pace: Pace
    model: str
    agreement: Agreement


async def play(
    targets: Targets, requests: Sequence[Request], ends_at: float, *, tell: report.Tell
) -> Played:
    """All requests to the target's first model, given up in time for some to its reference.

    `ends_at` is monotonic. Raises TargetError.
    """
    async with Client(targets.url, "") as client, Client(targets.reference, "") as alone:
        await client.check(requests[0])
        await alone.check(requests[0])
        left_s = max(1.0, RUN_SHARE * (ends_at - monotonic()))
        pace = Pace(rate=OWN_TIMES, deadline_s=left_s)
        run = await drive(client.send, requests, pace, done=tell("replay"))
        done = tell("the reference")
        agreement = await check_run(alone, run, ends_at=ends_at, done=done)
        return Played(run, pace, client.model, agreement)


def measure(found: report.Report, requests: Sequence[Request], options: ReplayOptions) -> Played:
    """All requests to the target and the reference that are given, or to an own cluster.

    Raises TargetError.
    """
    ends_at = found.ends_at - RESERVE_S
    with report.progress(found.console, 2 * len(requests)) as tell, targets_of(options) as targets:
        return asyncio.run(play(targets, requests, ends_at, tell=tell))


def publish(found: report.Report, trace: str, scaled: Scaled, *, summary: Summary) -> None:
    """The table and the plot."""
    came = summary.hits
    cells = [
        trace,
        f"{len(scaled.records):,}",
        str(summary.failed),
        f"{scaled.ideal:.1%}",
        NOT_TOLD if came is None else f"{came:.1%}",
        f"{summary.ttft.median:.0f}",
        f"{summary.ttft.p99:.0f}",
        f"{summary.tpot.median:.1f}",
        f"{summary.output_throughput:.0f}",
    ]
    note = (
        f"lengths x {scaled.length_scale:.3g}, times x {scaled.time_scale:.3g}; "
        f"{machine.describe(found.host)}"
    )
    found.publish("Replay", headers=HEADERS, rows=[cells], note=note)
    shares = {"ideal": [Spread.of([100 * scaled.ideal])]}
    if came is not None:
        shares["came"] = [Spread.of([100 * came])]
    grouped_bars(found.plot(), [trace], shares, ylabel="hits, % of the prompt tokens")


def measure_trace(load: Callable[[], ReplayOptions]) -> None:
    """The command; status 1 if answers differ or none comes, 2 if it cannot measure."""
    try:
        options = load()
        found = report.Report("replay", Path(options.out), SECONDS, cpu="all", quick=options.quick)
        scaled = options.limits().scale(records_of(options))
        share = f"{scaled.ideal:.1%}"
        found.console.print(f"{options.trace}: {len(scaled.records)} requests, ideal hits {share}")
        sent = requests_of(
            scaled.records,
            ids_of(options),
            time_scale=scaled.time_scale,
            stamps=options.stamps,
        )
        played = measure(found, sent, options)
    except (ConfigError, TargetError, TraceError, OSError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    summary = Summary.of(played.run)
    if summary.errors:
        found.console.print(f"{len(summary.errors)} failed: {summary.errors[0]}", style="red")
    target = options.target or "proxy, P and D"
    holds = tell(found.console, {target: played.agreement})
    if holds:
        publish(found, options.trace, scaled, summary=summary)
    scales = {"time_scale": scaled.time_scale, "length_scale": scaled.length_scale}
    results = [result(summary, played.pace, target=target, model=played.model)]
    data = {"ideal": scaled.ideal, "agreement": played.agreement, "results": results}
    found.save({**scales, **data})
    raise typer.Exit(0 if holds else 1)


if __name__ == "__main__":
    command_app(ReplayOptions, measure_trace, PURPOSE)()
