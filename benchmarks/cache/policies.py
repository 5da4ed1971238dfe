"""`python -m benchmarks.cache policies`: how much of the ideal each checkpoint policy hits.

A prefill node's real KV cache, ids only, with the units of Qwen3.5-4B, serves G1 conversation, G2
documents, or a trace in Mooncake's format, one prompt after another: with endless memory, and with
shares of the footprint, which is what the fixed policy with most reasons keeps with endless memory.

- ideal: tokens that some earlier prompt began with, without a prompt's last token, by brute force.
- write: a state copied out while prefilling. The request's own state, which stays where it is when
  the request ends, costs no write; it takes room like any other, one per request.
- lost: tokens whose attention blocks were there, but no state.

A trace says only every 512 tokens what two prompts share, so its node has 512-token blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.cache import adversarial
from benchmarks.cache.geometries import BLOCK_SIZE, GEOMETRIES
from benchmarks.cache.prefill_replay import FIXED, POLICIES, Prompt, Tally, prompts_of, replay
from benchmarks.support import machine, report
from benchmarks.support.plots import curves
from benchmarks.workloads.adversarial import cases
from benchmarks.workloads.catalogue import THINNED
from benchmarks.workloads.files import read_trace
from benchmarks.workloads.traces import TRACE_BLOCK, Record, TraceError

GEOMETRY = GEOMETRIES["Qwen3.5-4B"]
SECONDS = (180, 30)
QUICK_SCALE, QUICK_SIZES = 0.01, "0.25"
SIZES = "0.02,0.1,0.25,0.5,1"
LEAST_OF_IDEAL = 0.98
MOST_WRITES = 2.0
DEFAULT = "default"
HEADERS = (
    "case",
    "requests",
    "hit %",
    "of the ideal",
    "writes per request",
    "lost per request",
    "98 % at <= 2",
)
ADVERSARIAL_HEADERS = (
    "case",
    "prompts",
    "ideal tokens",
    "hit tokens",
    "worst loss",
    "at most one block",
)


class Row(msgspec.Struct, frozen=True):
    """One policy on one workload; `memory`: share of the footprint, None for endless."""

    workload: str
    policy: str
    memory: float | None
    requests: int
    refused: int
    hit_share: float
    of_ideal: float
    writes: float
    lost: float

    @classmethod
    def of(cls, workload: str, policy: str, memory: float | None, *, tally: Tally) -> "Row":
        """The figures per request."""
        return cls(
            workload,
            policy,
            memory,
            tally.requests,
            tally.refused,
            tally.hit_share,
            tally.of_ideal,
            tally.writes_per_request,
            tally.lost / tally.requests,
        )


class Workload:
    """One request stream and the arenas it is served from."""

    def __init__(self, name: str, records: list[Record], block_size: int) -> None:
        self.name = name
        self.prompts: list[Prompt] = prompts_of(records, block_size)
        self._block_size = block_size
        self._distinct = sum(prompt.num_tokens - prompt.ideal for prompt in self.prompts)
        self._footprint = 0

    def endless(self, policy: str) -> Row:
        """Twice the room for all blocks, and for a state every 512 tokens besides."""
        states = 4 * len(self.prompts) + self._distinct // TRACE_BLOCK
        return self._row(policy, None, 2 * self._bytes(states))

    def share(self, policy: str, memory: float) -> Row:
        """`memory` times what `FIXED` keeps."""
        if not self._footprint:
            tally = self.endless(FIXED)
            self._footprint = self._bytes(round((1 + tally.writes) * tally.requests))
        return self._row(policy, memory, round(memory * self._footprint))

    def _bytes(self, states: int) -> int:
        return self._distinct * GEOMETRY.token_bytes + states * GEOMETRY.state_bytes

    def _row(self, policy: str, memory: float | None, nbytes: int) -> Row:
        plan = GEOMETRY.units(nbytes, self._block_size)
        tally = replay(self.prompts, plan, POLICIES[policy])
        return Row.of(self.name, policy, memory, tally=tally)


def workloads(trace: Path | None, scale: float | None, seed: int) -> list[Workload]:
    """The first part of the trace, or the generators' streams."""
    if trace is not None:
        records = read_trace(trace)
        first = round((scale or 1.0) * len(records))
        return [Workload(trace.stem, records[: max(1, first)], TRACE_BLOCK)]
    return [
        Workload(name, make(scale or thinned, seed), BLOCK_SIZE)
        for name, (make, thinned) in THINNED.items()
    ]


def measure(
    streams: Sequence[Workload],
    policies: Sequence[str],
    sizes: Sequence[float],
    *,
    describe: Callable[[str], Callable[[], None]],
) -> list[Row]:
    """Every policy on every workload at every size."""
    rows = []
    for stream in streams:
        for policy in policies:
            done = describe(f"{stream.name}, {policy}")
            rows.append(stream.endless(policy))
            done()
            for memory in sizes:
                rows.append(stream.share(policy, memory))
                done()
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table of endless memory."""
    met = row.of_ideal >= LEAST_OF_IDEAL and row.writes <= MOST_WRITES
    return [
        f"{row.workload}: {row.policy}",
        f"{row.requests:,}",
        f"{row.hit_share:.1%}",
        f"{row.of_ideal:.1%}",
        f"{row.writes:.2f}",
        f"{row.lost:,.0f}",
        "met" if met else "MISSED" if row.policy == DEFAULT else "no",
    ]


def by_memory(rows: Sequence[Row]) -> Mapping[tuple[str, str], list[Row]]:
    """(workload, policy) to its rows with limited memory, least first."""
    table: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.memory is not None:
            table.setdefault((row.workload, row.policy), []).append(row)
    return {key: sorted(line, key=lambda row: row.memory or 0.0) for key, line in table.items()}


def memory_cells(key: tuple[str, str], line: Sequence[Row]) -> list[str]:
    """One line of the table of limited memory: share of the ideal, writes, refused prompts."""
    refused = [f" ({row.refused} refused)" if row.refused else "" for row in line]
    shares = [f"{row.of_ideal:.1%}{note}" for row, note in zip(line, refused, strict=True)]
    return [": ".join(key), *shares]


def adversarial_cells(result: adversarial.Result) -> list[str]:
    """One line of the table of G6."""
    verdict = {True: "met", False: "MISSED", None: "not judged"}[result.is_met]
    return [
        result.case,
        str(result.prompts),
        f"{result.ideal:,}",
        f"{result.hits:,}",
        str(result.worst),
        verdict,
    ]


def publish(found: report.Report, rows: Sequence[Row], *, note: str) -> None:
    """The tables of endless and of limited memory."""
    endless = [cells(row) for row in rows if row.memory is None]
    found.publish("Checkpoint policies, endless memory", headers=HEADERS, rows=endless, note=note)
    lines = by_memory(rows)
    if lines:
        shares = [f"{row.memory:.0%}" for row in next(iter(lines.values()))]
        found.publish(
            "Share of the ideal by memory, in % of the footprint",
            headers=("case", *shares),
            rows=[memory_cells(key, line) for key, line in lines.items()],
            note=note,
        )


def publish_adversarial(
    found: report.Report, results: Sequence[adversarial.Result], *, note: str
) -> None:
    """The table of G6."""
    rows = list(map(adversarial_cells, results))
    found.publish("G6 adversarial", headers=ADVERSARIAL_HEADERS, rows=rows, note=note)


def draw(file: Path, rows: Sequence[Row]) -> None:
    """Share of the ideal over memory, one panel per workload."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for (workload, policy), line in by_memory(rows).items():
        points = [(100 * (row.memory or 0.0), 100 * row.of_ideal) for row in line]
        panels.setdefault(workload, {})[policy] = points
    curves(file, panels, xlabel="memory, % of the footprint", ylabel="hits, % of the ideal")


def shares_of(text: str) -> list[float]:
    """`0.02,0.1` as numbers; nothing for ``. Raises typer.BadParameter."""
    try:
        shares = [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 0.1,0.5") from error
    if any(not 0 < share <= 10 for share in shares):
        raise typer.BadParameter(f"{text!r}: shares lie above 0 and up to 10")
    return shares


def main(
    *,
    scale: Annotated[
        float | None,
        typer.Option(min=0.01, help="Share of sessions or lines. [0.03, 0.1; trace: 1]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the generators.")] = 0,
    sizes: Annotated[str, typer.Option(help="Memory, as shares of the footprint.")] = SIZES,
    policy: Annotated[list[str] | None, typer.Option(help="Only this one. [all]")] = None,
    trace: Annotated[Path | None, typer.Option(help="A Mooncake JSON-lines file instead.")] = None,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Hits and state writes of checkpoint policies on G1, G2 and G6, or on a trace."""
    found = report.Report("policies", out, SECONDS, cpu="all", quick=quick)
    shares = shares_of(QUICK_SIZES if quick else sizes)
    scale = QUICK_SCALE if quick and scale is None else scale
    try:
        streams = workloads(trace, scale, seed)
    except (TraceError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    policies = policy or list(POLICIES)
    if unknown := set(policies) - set(POLICIES):
        raise typer.BadParameter(f"{unknown}: known are {', '.join(POLICIES)}")
    total = len(streams) * len(policies) * (1 + len(shares))
    with report.progress(found.console, total) as describe:
        rows = measure(streams, policies, shares, describe=describe)
        results = [] if trace else list(map(adversarial.judge, cases()))
    note = machine.describe(found.host)
    publish(found, rows, note=note)
    if results:
        publish_adversarial(found, results, note=note)
    if shares:
        draw(found.plot(), rows)
    found.save({"rows": rows, "adversarial": results})
