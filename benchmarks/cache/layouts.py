"""`python -m benchmarks.cache layouts`: small blocks in units against upstream's inflated ones.

Both layouts cut arenas of the same size. Units: 16-token attention blocks, a state is one unit.
Inflated: an attention block is so long that its page is as large as one layer's state, states form
groups of as many layers as attention has, and every block or state of a group fills one page.
The cache itself is the same, so the inflated layout has Tandem's policy, end states and exact
lengths, which upstream has not; `last` is upstream's own choice, the last block boundary.

- at once: prompts of one length that fit the arena together, nothing shared, as yet no output.
- hits: share of the ideal on a prefill node with a quarter of the workload's footprint.
- MB per hand-over of G1: whole attention blocks and the state without padding, as the connector
  plans them; `first` onto an empty decode node, `all` onto one that keeps what it served.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.cache.decode_replay import DecodeNode, hand_overs
from benchmarks.cache.geometries import GEOMETRIES, Geometry
from benchmarks.cache.prefill_replay import POLICIES, Policy, prompts_of, replay
from benchmarks.support import report
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars
from benchmarks.workloads.conversation import conversation
from benchmarks.workloads.documents import documents
from benchmarks.workloads.traces import Record, ideal_hits
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests

SECONDS = (180, 30)
QUICK_SCALE = 0.2
HELD_BYTES = 40 << 30
LENGTHS = (12, 1_000, 12_000)
FOOTPRINT_SHARE = 0.25
STATES_PER_PROMPT = 2.5
HEADERS = ("case", "units", "inflated", "inflated / units", "units win")

Planner = Callable[[int], ArenaPlan]


class Row(msgspec.Struct, frozen=True):
    """One figure of both layouts; `more` is better, or less."""

    case: str
    units: float
    inflated: float
    more: bool

    @property
    def ratio(self) -> float:
        """Inflated relative to units."""
        return self.inflated / self.units

    @property
    def verdict(self) -> str:
        """Whether units win."""
        if self.units == self.inflated:
            return "equal"
        return "yes" if (self.units > self.inflated) == self.more else "NO"


def prompts_held(plan: ArenaPlan, num_tokens: int) -> int:
    """How many prompts of that length fit at once."""
    cache = KVCacheManager(plan, prefix_caching=False)
    nothing = cache.find_hit(PrefixDigests(cache.hasher, [], None), 0)
    held = 0
    while cache.start(nothing, num_tokens) is not None:
        held += 1
    return held


def share_of_ideal(plan: ArenaPlan, records: list[Record], policy: Policy | None) -> float:
    """Hit tokens on one prefill node."""
    return replay(prompts_of(records, plan.hash_block_size), plan, policy).of_ideal


def megabytes(plan: ArenaPlan, records: Sequence[Record], *, remembers: bool) -> float:
    """Mean megabytes per hand-over."""
    node, moved = DecodeNode(plan, remembers=remembers), 0
    for hand_over in hand_overs(records, node.cache.hasher):
        pull = node.serve(hand_over)
        moved += pull.attention_bytes + pull.state_bytes
    return moved / 1e6 / len(records)


def compare(geometry: Geometry, streams: Mapping[str, list[Record]]) -> Iterator[Row]:
    """All figures of one model."""
    plans: tuple[Planner, Planner] = (geometry.units, geometry.inflated)
    for size in LENGTHS:
        held = [prompts_held(plan(HELD_BYTES), size) for plan in plans]
        yield Row(f"{size:,} tokens, prompts at once", held[0], held[1], more=True)
    for name, records in streams.items():
        memory = quarter(geometry, records)
        hits = [share_of_ideal(plan(memory), records, POLICIES["default"]) for plan in plans]
        yield Row(f"{name}, % of ideal hits", 100 * hits[0], 100 * hits[1], more=True)
        last = share_of_ideal(geometry.inflated(memory), records, POLICIES["last"])
        yield Row(
            f"{name}, % of ideal hits, inflated with `last`", 100 * hits[0], 100 * last, more=True
        )
    memory = quarter(geometry, streams["G1"])
    for name, remembers in (("first", False), ("all", True)):
        moved = [megabytes(plan(memory), streams["G1"], remembers=remembers) for plan in plans]
        yield Row(f"MB per hand-over, {name}", moved[0], moved[1], more=False)


def quarter(geometry: Geometry, records: list[Record]) -> int:
    """A quarter of the bytes of all distinct blocks and a few states per prompt."""
    prompt_tokens = sum(record.input_length for record in records)
    distinct = prompt_tokens - sum(ideal_hits(records))
    states = round(STATES_PER_PROMPT * len(records))
    footprint = distinct * geometry.token_bytes + states * geometry.state_bytes
    return round(FOOTPRINT_SHARE * footprint)


def run(models: Sequence[str], console: Console, *, scale: float, seed: int) -> list[Row]:
    """Every model on the same streams."""
    streams = {
        "G1": conversation(0.025 * scale, seed),
        "G2": documents(0.075 * scale, seed),
    }
    rows = []
    total = len(models) * (len(LENGTHS) + 2 * len(streams) + 2)
    with report.progress(console, total) as describe:
        for model in models:
            geometry = GEOMETRIES[model]
            title = f"{model}, {geometry.inflated_block_size}"
            done = describe(title)
            for row in compare(geometry, streams):
                rows.append(msgspec.structs.replace(row, case=f"{title}: {row.case}"))
                done()
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    digits = 0 if min(row.units, row.inflated) >= 100 else 1
    values = [f"{value:,.{digits}f}" for value in (row.units, row.inflated)]
    return [row.case, *values, f"{row.ratio:.2f}", row.verdict]


def main(
    *,
    model: Annotated[
        list[str] | None, typer.Option(help=f"{' or '.join(GEOMETRIES)}. [both]")
    ] = None,
    scale: Annotated[float, typer.Option(min=0.1, help="More or fewer sessions.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the generators.")] = 0,
    cpu: Annotated[str, typer.Option(help="Core to run on, or `all`.")] = "0",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Prompts held, hits and bytes moved: units against inflated blocks on equal memory."""
    if unknown := set(model or ()) - set(GEOMETRIES):
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(GEOMETRIES)}")
    found = report.Report("layouts", out, SECONDS, cpu=cpu, quick=quick)
    models = model or list(GEOMETRIES)
    if quick:
        models, scale = models[:1], QUICK_SCALE
    rows = run(models, found.console, scale=scale, seed=seed)
    note = "the number behind a model is its inflated block size, in tokens"
    lines = list(map(cells, rows))
    found.publish("Units and inflated blocks", headers=HEADERS, rows=lines, note=note)
    draw(found.plot(), rows)
    found.save(rows)


def draw(file: Path, rows: Sequence[Row]) -> None:
    """The inflated layout relative to units, by figure, one bar per model."""
    series: dict[str, list[Spread]] = {}
    labels: dict[str, None] = {}
    for row in rows:
        model, _, case = row.case.partition(": ")
        series.setdefault(model, []).append(Spread.of([row.ratio]))
        labels[case] = None
    marks = [1.0] * len(labels)
    grouped_bars(file, list(labels), series, ylabel="inflated / units", marks=marks)
