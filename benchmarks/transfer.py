"""`python -m benchmarks.transfer`: hand-over GB/s beside a plain memcpy and beside NIXL itself.

Two processes on this host, real arenas and the connector's own span plans. Sizes are those of
Qwen3.5-4B in bfloat16: 8 attention layers (32 KiB per token), 24 GDN layers (51.5 MB of state).

- memcpy: one thread, the same spans, from this process's own memory.
- raw nixl: a read of the same spans with NIXL's Python agent, one request, polled without a pause.
- shm, nixl, ucx, zmq: what a pull thread does: plan the spans from block tables, read, wait.

Every way's bytes are checked after every run. Both NIXL readers go without a progress thread, which
would spin on a core that the other ways need.
"""

import ctypes
import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.pairs import Spread, alternate
from benchmarks.plots import grouped_bars
from connector.pd.geometry import geometry_of
from connector.pd.layout import blocks_announced
from connector.pd.pull_plan import plan_pull
from connector.transports.base import SpanPair, Transport
from connector.transports.choose import open_transport
from connector.transports.nixl import NixlAddress
from engine.arena import ArenaMemory
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.plan import ArenaPlan, plan_arena
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec
from engine.logs import configure_logging

GDN = MambaSpec("gdn", (3, 8192), "bfloat16", (32, 128, 128))
ATTENTION = FullAttentionSpec(num_kv_heads=4, head_dim=256, dtype="bfloat16")
GROUPS = (
    KVCacheGroup(GDN, tuple(layer for layer in range(32) if layer % 4 != 3)),
    KVCacheGroup(ATTENTION, tuple(range(3, 32, 4))),
)
ARENA_BYTES = 1400 << 20
DEADLINE_S = 60.0
FILL = 7
TARGET = 0.8
OURS = ("shm", "nixl", "ucx", "zmq")  # NIXL before ucx: opened after it, NIXL is slower
TARGETS = (("shm", "memcpy"), ("nixl", "raw nixl"))
RATIOS = (*TARGETS, ("ucx", "memcpy"), ("zmq", "memcpy"))
HEADERS = ("case", "MB", "spans", "memcpy", "shm", "shm / memcpy", "raw nixl", "nixl",
           "nixl / raw nixl", "both >= 0.8", "ucx", "ucx / memcpy", "zmq",
           "zmq / memcpy")  # fmt: skip

Read = Callable[[Sequence[SpanPair]], None]
Tables = Sequence[Sequence[int]]


class Case(msgspec.Struct, frozen=True):
    """A prompt of `tokens` tokens, prefilled in chunks of `chunk` in turn with another one."""

    name: str
    tokens: int
    chunk: int


CASES = (
    Case("1,700 tokens", 1_700, 2_048),
    Case("1,700 tokens, worst layout", 1_700, 16),
    Case("16k tokens", 16_384, 16_384),
    Case("16k tokens, chunked beside another", 16_384, 2_048),
)


class Row(msgspec.Struct, frozen=True):
    """GB/s of every way, and the ratios by round."""

    case: str
    nbytes: int
    spans: int
    speeds: dict[str, Spread]
    ratios: dict[str, Spread]


@dataclass(slots=True, frozen=True)
class Prompt:
    """Where one case's blocks lie: D's tables, and P's offsets as its lease announces them."""

    plan: ArenaPlan
    local: Tables
    remote: Tables
    tokens: int

    @classmethod
    def of(cls, plan: ArenaPlan, case: Case) -> "Prompt":
        """D reserves in one go; P grew the tables chunk by chunk, in turn with another prompt."""
        local = _tables(plan, case.tokens, case.tokens)
        grown = _tables(plan, case.tokens, case.chunk)
        remote = [
            tuple(plan.block_offset(group, block) for block in blocks)
            for group, blocks in enumerate(grown)
        ]
        return cls(plan, local, remote, case.tokens)

    def spans(self) -> tuple[SpanPair, ...]:
        """What a pull reads."""
        plan, tokens = self.plan, self.tokens
        offsets = list(map(tuple, self.remote))
        remote = blocks_announced(plan, geometry_of(plan), offsets, num_tokens=tokens)
        return plan_pull(plan, remote, self.local, num_tokens=tokens, num_local_tokens=0).spans


def _tables(plan: ArenaPlan, tokens: int, chunk: int) -> Tables:
    manager = KVCacheManager(plan, prefix_caching=False)
    nothing = manager.find_hit(PrefixDigests(manager.hasher, [0], None), 0)
    first = min(chunk, tokens)
    mine, other = manager.start(nothing, first), manager.start(nothing, first)
    assert mine is not None and other is not None
    for end in range(2 * chunk, tokens + chunk, chunk):
        for tables in (mine, other):
            assert manager.grow(tables, min(end, tokens)), "the arena is too small"
    return mine.groups


def serve(pipe: Connection, nbytes: int) -> None:
    """The peer process: one arena, registered with every transport, until the pipe closes."""
    configure_logging("WARNING")
    arena = ArenaMemory(nbytes)
    arena.tensor.fill_(FILL)
    transports = [open_transport(name, "bench-p") for name in OURS]
    pipe.send([transport.register(arena) for transport in transports])
    pipe.poll(None)
    for transport in transports:
        transport.close()
    arena.close()


@contextmanager
def peer_addresses(nbytes: int) -> Iterator[list[bytes]]:
    """Addresses of a peer process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, nbytes))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(DEADLINE_S)


def memcpy_read(arena: ArenaMemory) -> Read:
    """The ceiling: the same spans out of this process's own memory."""
    source = torch.full((arena.nbytes,), FILL, dtype=torch.uint8)

    def read(spans: Sequence[SpanPair]) -> None:
        local, remote = arena.data_ptr, source.data_ptr()
        for span in spans:
            ctypes.memmove(local + span.local, remote + span.remote, span.length)

    return read


def raw_nixl_read(arena: ArenaMemory, blob: bytes) -> Read:
    """NIXL's Python API as its examples use it; nothing is checked."""
    nixl = importlib.import_module("nixl")  # heavy and optional
    agent = nixl.nixl_agent("bench-raw", nixl.nixl_agent_config(enable_prog_thread=False))
    agent.register_memory([(arena.data_ptr, arena.nbytes, 0, "")], "DRAM")
    peer = msgspec.msgpack.decode(blob, type=NixlAddress)
    agent.add_remote_agent(peer.metadata)

    def descriptors(base: int, offsets: Sequence[tuple[int, int]]) -> Any:
        return agent.get_xfer_descs([(base + start, size, 0) for start, size in offsets], "DRAM")

    def read(spans: Sequence[SpanPair]) -> None:
        local = descriptors(arena.data_ptr, [(span.local, span.length) for span in spans])
        remote = descriptors(peer.base, [(span.remote, span.length) for span in spans])
        request = agent.initialize_xfer("READ", local, remote, peer.agent)
        status = agent.transfer(request)
        while status == "PROC":
            status = agent.check_xfer_state(request)
        agent.release_xfer_handle(request)

    return read


def transport_read(transport: Transport, address: bytes) -> Read:
    """Our transport as a pull thread uses it."""
    transport.connect("p", address)

    def read(spans: Sequence[SpanPair]) -> None:
        transport.read("p", spans).wait(DEADLINE_S)

    return read


@dataclass(slots=True, frozen=True)
class Bench:
    """The local arena and all ways to fill it."""

    arena: ArenaMemory
    plain: dict[str, Read]
    ours: dict[str, Read]

    def measure(self, case: Case, plan: ArenaPlan, rounds: int, *, done: Callable[[], None]) -> Row:
        """GB/s over `rounds` rounds; planning counts for our transports, not for the baselines."""
        prompt = Prompt.of(plan, case)
        spans = prompt.spans()
        ways = {
            name: _timed(self.arena, spans, read, plan=lambda: spans)
            for name, read in self.plain.items()
        }
        ways |= {
            name: _timed(self.arena, spans, read, plan=prompt.spans)
            for name, read in self.ours.items()
        }
        total = sum(span.length for span in spans)
        seconds = alternate(ways, rounds, warmups=2, done=done)
        speeds = {name: [total / 1e9 / time for time in times] for name, times in seconds.items()}
        return Row(
            case.name,
            total,
            len(spans),
            {name: Spread.of(values) for name, values in speeds.items()},
            {ours: Spread.of_ratio(speeds[ours], speeds[other]) for ours, other in RATIOS},
        )


def _timed(
    arena: ArenaMemory,
    spans: Sequence[SpanPair],
    read: Read,
    *,
    plan: Callable[[], Sequence[SpanPair]],
) -> Callable[[], float]:
    """Seconds of one run into zeroed memory; raises RuntimeError unless every byte has arrived."""
    targets = [arena.tensor[span.local : span.local + span.length] for span in spans]

    def run() -> float:
        for target in targets:
            target.zero_()
        started = perf_counter()
        read(plan())
        seconds = perf_counter() - started
        if not all(bool((target == FILL).all()) for target in targets):
            raise RuntimeError("the bytes did not arrive")
        return seconds

    return run


def run(rounds: int, console: Console) -> list[Row]:
    """All cases."""
    plan = plan_arena(GROUPS, 16, ARENA_BYTES)
    arena = ArenaMemory(plan.arena_bytes)
    transports = {name: open_transport(name, "bench-d") for name in OURS}
    for transport in transports.values():
        transport.register(arena)
    total = len(CASES) * (2 + len(OURS)) * (rounds + 2)
    with peer_addresses(arena.nbytes) as blobs, report.progress(console, total) as tell:
        at = dict(zip(OURS, blobs, strict=True))
        plain = {"memcpy": memcpy_read(arena), "raw nixl": raw_nixl_read(arena, at["nixl"])}
        ours = {name: transport_read(opened, at[name]) for name, opened in transports.items()}
        bench = Bench(arena, plain, ours)
        rows = [bench.measure(case, plan, rounds, done=tell(case.name)) for case in CASES]
    for transport in transports.values():
        transport.close()
    arena.close()
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    speeds = {name: f"{speed.median:.1f}" for name, speed in row.speeds.items()}
    met = all(row.ratios[ours].median >= TARGET for ours, _ in TARGETS)
    return [
        row.case,
        f"{row.nbytes / 1e6:.0f}",
        str(row.spans),
        speeds["memcpy"],
        speeds["shm"],
        row.ratios["shm"].show(),
        speeds["raw nixl"],
        speeds["nixl"],
        row.ratios["nixl"].show(),
        "met" if met else "MISSED",
        speeds["ucx"],
        row.ratios["ucx"].show(),
        speeds["zmq"],
        row.ratios["zmq"].show(),
    ]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after two.")] = 15,
    cpu: Annotated[str, typer.Option(help="Cores to run on, as `0,1`, or `all`.")] = "all",
    json: Annotated[Path | None, typer.Option(help="Also write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the speeds (svg, png).")] = None,
) -> None:
    """Hand-over GB/s of every transport beside memcpy and beside raw NIXL, in one run."""
    console = Console()
    configure_logging("WARNING")
    host = machine.prepare(cpu)
    rows = run(rounds, console)
    note = f"GB/s, median of {rounds} rounds; {machine.describe(host)}"
    report.publish(console, "Hand-over", headers=HEADERS, rows=list(map(cells, rows)), note=note)
    report.write_json(json, {"machine": host, "rows": rows})
    if plot is not None:
        names = ("memcpy", "shm", "raw nixl", "nixl", "ucx", "zmq")
        series = {name: [row.speeds[name] for row in rows] for name in names}
        grouped_bars(plot, [row.case for row in rows], series, ylabel="GB/s")


if __name__ == "__main__":
    typer.run(main)
