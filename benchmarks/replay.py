"""`python -m benchmarks.replay G1` or `TRACE.jsonl`: a request trace against a cluster.

A generated workload or a file in Mooncake's format is scaled in time and in length, and sent to an
own cluster of P, D and proxy, or to `--target`. First comes the ideal: the share of the prompt
tokens, of exactly the requests that are sent, that some earlier prompt began with. Then come the
hits that the server tells of, which may exceed it: a server may find its answers, too.

Turns of a session wait for the answer before them and think as long as the trace says; `--stamps`
sends every request at its own time instead, which makes the tail of a server that is behind worse.
Prompts are token ids; equal segments of a trace become equal ids.
"""

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated

import msgspec
import typer

from benchmarks import machine, report
from benchmarks.cluster import cluster
from benchmarks.load.client import Client, TargetError
from benchmarks.load.loop import OWN_TIMES, Pace, Run, drive
from benchmarks.load.request import GREEDY, WITH_IDS, Request
from benchmarks.load.summary import Summary
from benchmarks.models import SHARED, WIDE, save_random
from benchmarks.pairs import Spread
from benchmarks.plots import grouped_bars
from benchmarks.workloads.catalogue import WORKLOADS
from benchmarks.workloads.traces import Record, TraceError, arrivals, ideal_hits, read_trace

SECONDS = (300, 60)
SPAN_S, QUICK_SPAN_S = 60.0, 3.0
REQUESTS, QUICK_REQUESTS = 60, 6
LONGEST, QUICK_LONGEST = 4096, 256
MOST_OUTPUT, QUICK_OUTPUT = 64, 8
THINNED = 0.03
ARENA_BYTES = 1 << 30
RESERVE_S = 15.0
HEADERS = ("trace", "requests", "failed", "ideal hits", "hits that came", "TTFT ms p50", "p99",
           "TPOT ms p50", "tok/s")  # fmt: skip


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


def requests_of(scaled: Scaled, *, stamps: bool, is_own: bool) -> list[Request]:
    """In the order of the trace, with token ids that every model has."""
    base = WITH_IDS if is_own else GREEDY
    made = []
    for at, record in zip(arrivals(scaled.records), scaled.records, strict=True):
        salt = {"cache_salt": record.cache_salt} if record.cache_salt else {}
        is_later = record.parent is not None and not stamps
        alone = stamps or record.session_id is None
        made.append(
            Request(
                prompt=tuple(_tokens(record)),
                max_tokens=record.output_length,
                sampling={**base, **salt},
                session="" if alone else str(record.session_id),
                arrival_s=0.0 if is_later else at * scaled.time_scale,
                think_s=(record.think_time or 0.0) / 1000 * scaled.time_scale * is_later,
            )
        )
    return made


def _tokens(record: Record) -> Iterator[int]:
    """Drawn from a segment's number, so that a longer piece of it begins with a shorter one."""
    for number, size in record.pieces():
        draw = random.Random(number)
        yield from (draw.randrange(2, SHARED["vocab_size"]) for _ in range(size))


def load(trace: str, most: int) -> list[Record]:
    """The first of a generated workload, thinned, or a whole file. Raises TraceError and OSError.

    `python -m benchmarks.workloads NAME --out FILE` writes other seeds and sizes to files.
    """
    if trace in WORKLOADS:
        return WORKLOADS[trace].make(THINNED, 0)[:most]
    return read_trace(Path(trace))


@contextmanager
def target_of(url: str | None) -> Iterator[str]:
    """The base URL that is given, or that of an own cluster, which ends with the block."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_random(WIDE, Path(folder))
        with cluster(checkpoint, "--kv-cache-memory-bytes", str(ARENA_BYTES)) as up:
            yield up.proxy


async def play(
    url: str, requests: Sequence[Request], ends_at: float, *, done: Callable[[], None]
) -> Run:
    """All requests to the target's first model, given up at `ends_at` (monotonic).

    Raises TargetError.
    """
    async with Client(url, "") as client:
        client.model = (await client.served_models())[0]
        await client.check(requests[0])
        left_s = max(1.0, ends_at - RESERVE_S - monotonic())
        pace = Pace(rate=OWN_TIMES, deadline_s=left_s)
        return await drive(client.send, requests, pace, done=done)


def measure(found: report.Report, requests: Sequence[Request], target: str | None) -> Run:
    """All requests to the target, or to an own cluster. Raises TargetError."""
    with report.progress(found.console, len(requests)) as tell, target_of(target) as url:
        return asyncio.run(play(url, requests, found.ends_at, done=tell("replay")))


def publish(found: report.Report, trace: str, scaled: Scaled, *, summary: Summary) -> None:
    """The table, the plot and the file."""
    came = summary.cached_tokens / max(1, summary.input_tokens)
    cells = [
        trace,
        f"{len(scaled.records):,}",
        str(summary.failed),
        f"{scaled.ideal:.1%}",
        f"{came:.1%}",
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
    shares = {"ideal": [Spread.of([100 * scaled.ideal])], "came": [Spread.of([100 * came])]}
    grouped_bars(found.plot(), [trace], shares, ylabel="hits, % of the prompt tokens")
    scales = {"time_scale": scaled.time_scale, "length_scale": scaled.length_scale}
    found.save({**scales, "ideal": scaled.ideal, "results": [summary.fields()]})


def main(
    trace: Annotated[str, typer.Argument(help=f"A file, or {', '.join(WORKLOADS)}.")] = "G1",
    *,
    target: Annotated[str | None, typer.Option(help="A base URL instead of an own one.")] = None,
    span: Annotated[float, typer.Option(min=0.1, help="Seconds of all arrivals.")] = SPAN_S,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = LONGEST,
    stamps: Annotated[bool, typer.Option("--stamps", help="Each at its own time.")] = False,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Hits and times of a trace, beside the hits that are possible."""
    found = report.Report("replay", out, SECONDS, cpu="all", quick=quick)
    limits = Limits(longest, MOST_OUTPUT, span)
    if quick:
        limits = Limits(QUICK_LONGEST, QUICK_OUTPUT, QUICK_SPAN_S)
    try:
        scaled = limits.scale(load(trace, QUICK_REQUESTS if quick else REQUESTS))
    except (TraceError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    found.console.print(f"{trace}: {len(scaled.records)} requests, ideal hits {scaled.ideal:.1%}")
    sent = requests_of(scaled, stamps=stamps, is_own=target is None)
    try:
        summary = Summary.of(measure(found, sent, target))
    except TargetError as error:
        raise typer.BadParameter(str(error)) from error
    if summary.errors:
        found.console.print(f"{len(summary.errors)} failed: {summary.errors[0]}", style="red")
    publish(found, trace, scaled, summary=summary)


if __name__ == "__main__":
    typer.run(main)
