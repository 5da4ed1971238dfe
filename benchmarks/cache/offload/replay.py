"""Hits that tiers add on a trace: the real scheduler, cache and offload decisions, ids only.

One prefill node with the sizes of Qwen3.5-4B serves prompts one after another. No byte moves and
nothing takes time: a copy, a write or a load has ended when its step ends, so these are the hits
that the decisions allow. The arena has 1 GiB and a share of the bytes of all different tokens of
the trace; the host tier has 4 times as many, the disk tier 16 times.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.cache.geometries import GEOMETRIES
from benchmarks.support.tandem_engine import request_of
from benchmarks.workloads.catalogue import THINNED
from benchmarks.workloads.files import read_trace
from benchmarks.workloads.traces import Record, TokenTable, ideal_hits
from connector.offload.chunk_plan import ChunkPlan
from connector.offload.config import OffloadConfig
from connector.offload.connector import slots_of
from connector.offload.messages import FileItems, FileRange, FileWrite, Orders, Report, WriteDone
from connector.offload.metrics import OffloadStats
from connector.offload.scheduler import OffloadScheduler
from engine.kv_cache.manager import KVCacheManager
from engine.kv_connector import SchedulerConnector
from engine.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.step import ConnectorOutput, ModelRunnerOutput, SampledToken, SchedulerOutput

HEADERS: Final = (
    "trace",
    "arena",
    "without",
    "host",
    "disk",
    "both",
    "ideal",
    "tokens per MB on disk",
)
GEOMETRY: Final = GEOMETRIES["Qwen3.5-4B"]
SHARES: Final = (0.03, 0.1, 0.3)
LEAST_ARENA: Final = 1 << 30
HOST_TIMES, DISK_TIMES = 4, 16
TIERS: Final = {
    "without": (0, 0),
    "host": (HOST_TIMES, 0),
    "disk": (0, DISK_TIMES),
    "both": (HOST_TIMES, DISK_TIMES),
}
NO_SAMPLE: Final = SampledToken(0, None)


class Row(msgspec.Struct, frozen=True):
    """One arena: hit share by tiers, and tokens that the disk saved per million bytes written."""

    trace: str
    arena_bytes: int
    hits: dict[str, float]
    ideal: float
    saved_per_mb: float

    def cells(self) -> list[str]:
        """A line of the table."""
        shares = [f"{self.hits[name]:.1%}" for name in TIERS]
        return [
            self.trace,
            f"{self.arena_bytes / 1e9:.1f} GB",
            *shares,
            f"{self.ideal:.1%}",
            f"{self.saved_per_mb:.0f}",
        ]


class Served(NamedTuple):
    """Prompt tokens, those of them that were found, and bytes written to disk."""

    tokens: int
    hits: int
    written: int


class InstantTiers:
    """A worker side without bytes; `max_bytes`: of all files."""

    def __init__(self, chunks: ChunkPlan, max_bytes: int) -> None:
        self.written = 0
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._files: OrderedDict[str, int] = OrderedDict()  # the last one used is last

    def do(self, orders: Orders | None) -> ConnectorOutput:
        """All that a step orders, and what comes of it."""
        if orders is None:
            return ConnectorOutput()
        for load in orders.loads:
            for part in load.parts:
                if isinstance(part.source, FileRange) and part.source.name in self._files:
                    self._files.move_to_end(part.source.name)
        written = tuple(WriteDone(write.write_id, self._write(write)) for write in orders.writes)
        report = Report(written, gone=self._trim(), ended=tuple(it.load_id for it in orders.loads))
        saved = tuple(write.save_id for write in orders.writes if write.save_id is not None)
        return ConnectorOutput(
            tuple(load.request_id for load in orders.loads), saved=saved, message=report
        )

    def _write(self, write: FileWrite) -> FileItems:
        name, sizes = str(write.write_id), [self._chunks.nbytes(item) for item in write.items]
        starts = accumulate(sizes, initial=0)
        ranges = [FileRange(name, start, n, 0) for start, n in zip(starts, sizes, strict=False)]
        self._files[name] = sum(sizes)
        self.written += sum(sizes)
        return FileItems(name, write.items, tuple(ranges))

    def _trim(self) -> tuple[str, ...]:
        gone = []
        while sum(self._files.values()) > self._max_bytes:
            gone.append(self._files.popitem(last=False)[0])
        return tuple(gone)


class Node:
    """One node; `host_bytes` and `disk_bytes` of its tiers, both 0 for none."""

    def __init__(self, arena_bytes: int, host_bytes: int, disk_bytes: int) -> None:
        plan = GEOMETRY.units(arena_bytes)
        self._longest = plan.longest_sequence(1 << 40)
        self._refused = 0
        self._tiers: InstantTiers | None = None
        connector = SchedulerConnector()
        if host_bytes or disk_bytes:
            chunks = ChunkPlan(plan)
            path = "simulated" if disk_bytes else None
            config = OffloadConfig(host_bytes=host_bytes, disk_path=path, disk_bytes=disk_bytes)
            slots, stats = slots_of(chunks, config), OffloadStats()
            connector = OffloadScheduler(
                chunks, slots, config, stats=stats, tiers=None, wake=lambda: None
            )
            self._tiers = InstantTiers(chunks, disk_bytes)
        cache = KVCacheManager(plan, listener=connector.cache_listener)
        self._scheduler = Scheduler(SchedulerConfig(), cache, connector)

    def serve(self, number: int, tokens: Sequence[int]) -> None:
        """One prompt, from its start to its first token; one that does not fit hits nothing."""
        if len(tokens) >= self._longest:
            self._refused += len(tokens)
            return
        request = Request.from_generate(
            request_of(number, tokens, 1),
            self._scheduler.cache.hasher,
            max_model_len=len(tokens) + 1,
            eos_token_ids=frozenset(),
        )
        self._scheduler.add(request)
        while self._scheduler.has_work or self._scheduler.loads:
            self._step()
        self._step()  # what its end has queued

    @property
    def served(self) -> Served:
        """The sums over all prompts so far."""
        stats = self._scheduler.stats
        written = self._tiers.written if self._tiers else 0
        tokens = stats.prefix_queries + self._refused
        return Served(tokens, stats.prefix_hits + stats.external_hits, written)

    def _step(self) -> None:
        output: SchedulerOutput = self._scheduler.schedule()
        sampled = {one.request_id: NO_SAMPLE for one in output.scheduled}
        transfers = self._tiers.do(output.connector) if self._tiers else ConnectorOutput()
        self._scheduler.update(ModelRunnerOutput(sampled), transfers)


def traces(trace: Path | None, part: float) -> dict[str, list[Record]]:
    """A trace's file; without one, that part of G1 and G2."""
    if trace is not None:
        return {trace.stem: read_trace(trace)}
    return {name: make(part * thinned, 0) for name, (make, thinned) in THINNED.items()}


def measure(
    streams: dict[str, list[Record]], done: Callable[[str], Callable[[], None]]
) -> list[Row]:
    """Every trace at every arena, without and with tiers."""
    rows = []
    for name, records in streams.items():
        ideal = sum(ideal_hits(records))
        total = sum(record.input_length for record in records)
        for share in SHARES:
            arena_bytes = LEAST_ARENA + round(share * (total - ideal) * GEOMETRY.token_bytes)
            served = {}
            for tiers, (host, disk) in TIERS.items():
                finished = done(f"{name}, {share:.0%} of the trace, {tiers}")
                served[tiers] = _replay(
                    records, Node(arena_bytes, *_sizes(arena_bytes, host, disk))
                )
                finished()
            hits = {tiers: each.hits / each.tokens for tiers, each in served.items()}
            more = served["disk"].hits - served["without"].hits
            saved = more / max(1.0, served["disk"].written / 1e6)
            rows.append(Row(name, arena_bytes, hits, ideal / total, saved))
    return rows


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Hits in % by trace and tiers, over the arena's GB."""
    made: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for name, share in {**row.hits, "ideal": row.ideal}.items():
            point = (row.arena_bytes / 1e9, 100 * share)
            made.setdefault(row.trace, {}).setdefault(name, []).append(point)
    return made


def _sizes(arena_bytes: int, host: int, disk: int) -> tuple[int, int]:
    return arena_bytes * host, arena_bytes * disk


def _replay(records: Sequence[Record], node: Node) -> Served:
    table = TokenTable.for_records(records)
    for number, record in enumerate(records):
        node.serve(number, table.tokens(record.pieces()))
    return node.served
