"""`python -m benchmarks.verification`: what it costs D to know that it has P's bytes.

Two processes on this host, a real control service on P and the pull thread's own reader on D, over
NIXL and over shm. Each round reads the same blocks without verification, with it while P hashes
them at the same time, and with it after P has hashed them: what is left then is D's part. Blocks
are those of Qwen3.5-4B in bfloat16 (512 KiB), in spans of one or more.
"""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.pairs import Spread, alternate
from benchmarks.transfer import ATTENTION, DEADLINE_S
from connector.pd.control import LeaseDesk
from connector.pd.digests import ArenaDigests
from connector.pd.faults import NO_FAULTS
from connector.pd.geometry import geometry_of
from connector.pd.layout import PullPlan, plan_pull, remote_groups
from connector.pd.lease import LeaseTable
from connector.pd.peers import Peer
from connector.pd.reading import PullReader
from connector.transports.base import Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.kv_cache.plan import ArenaPlan, plan_arena
from engine.kv_cache.spec import KVCacheGroup
from engine.logs import configure_logging
from engine.metrics import NodeMetrics, TransferMetrics
from engine.rpc.control_client import ControlClient
from engine.rpc.control_service import ControlService
from engine.rpc.messages import DIGESTS_XXH3_64, Handshake
from engine.rpc.server import start_server

GROUPS = (KVCacheGroup(ATTENTION, tuple(range(3, 32, 4))),)
BLOCK_SIZE = 16
ARENA_BYTES = 300 << 20
TOKENS = 4096
TARGET = 0.15
WAYS = ("nixl", "shm")
BLOCKS_PER_SPAN = (1, 2, 32)
HEADERS = ("transport", "span", "without", "verified", "P hashed before", "cost", "D's part",
           "cost <= 15 %")  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """GB/s of every way, and the share of speed that verification costs in all and on D alone."""

    transport: str
    span_bytes: int
    nbytes: int
    speeds: dict[str, Spread]
    cost: Spread
    cost_on_d: Spread


def arena_plan() -> ArenaPlan:
    """The arena of both sides."""
    return plan_arena(GROUPS, BLOCK_SIZE, ARENA_BYTES)


def offsets(plan: ArenaPlan, blocks_per_span: int) -> tuple[int, ...]:
    """P's blocks: runs of so many neighbours, the last run first."""
    count = plan.blocks_for(0, TOKENS)
    runs = range(0, count, blocks_per_span)
    blocks = [start + i for start in reversed(runs) for i in range(blocks_per_span)]
    return tuple(plan.block_offset(0, block) for block in blocks)


def serve(pipe: Connection) -> None:
    """The peer process: arena, transports and control service, until the pipe closes."""
    configure_logging("WARNING")
    plan = arena_plan()
    arena = ArenaMemory(plan.arena_bytes)
    arena.tensor.random_(256)
    transports = [open_transport(name, "bench-p") for name in WAYS]
    addresses = [transport.register(arena) for transport in transports]
    asyncio.run(_answer(pipe, desk_of(plan, arena), addresses))
    for transport in transports:
        transport.close()
    arena.close()


def desk_of(plan: ArenaPlan, arena: ArenaMemory) -> LeaseDesk:
    """Grants a lease that was released anew, so that its digests are not known yet."""
    leases = LeaseTable(600.0, perf_counter)

    def grant() -> None:
        for blocks_per_span in BLOCKS_PER_SPAN:
            if leases.claim(str(blocks_per_span)) is None:
                leases.grant(str(blocks_per_span), (offsets(plan, blocks_per_span),), TOKENS)

    grant()
    identity = Handshake(engine_id="p", transport="nixl", transport_address=b"", geometry={})
    return LeaseDesk(identity, leases, digest=ArenaDigests(plan, arena).of, wake=grant)


async def _answer(pipe: Connection, desk: LeaseDesk, addresses: list[bytes]) -> None:
    server = await start_server([ControlService(desk)], "127.0.0.1", 0, token=None)
    pipe.send((server.port, addresses))
    await asyncio.to_thread(pipe.poll, None)
    await server.close()


@contextmanager
def peer_process() -> Iterator[tuple[int, list[bytes]]]:
    """Port and addresses of a peer process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(DEADLINE_S)


class Reader:
    """One transport's reads as a pull thread makes them, with and without verification."""

    def __init__(self, transport: Transport, arena: ArenaMemory, peer: Peer) -> None:
        metrics = TransferMetrics(NodeMetrics("bench", "d"))
        self._peer = peer
        self._arena = arena
        self._readers = {
            verify: PullReader(
                transport,
                arena,
                verify=verify,
                metrics=metrics,
                faults=NO_FAULTS,
            )
            for verify in (False, True)
        }

    def seconds(
        self, plan: PullPlan, request_id: str, *, verify: bool, ahead: bool = False
    ) -> float:
        """One read of a prefill that P grants anew, and may have hashed ahead of it."""
        control, timeout_s = self._peer.control, self._peer.timeout_s
        claim = control.claim("p", request_id, timeout_s=timeout_s)
        if ahead:
            control.ask_digests(
                "p", request_id, claim.generation, first_blocks=[0], timeout_s=timeout_s
            ).result()
        self._arena.tensor.zero_()
        started = perf_counter()
        self._readers[verify].read(
            self._peer,
            plan,
            request_id=request_id,
            generation=claim.generation,
            timeout_s=DEADLINE_S,
        )
        seconds = perf_counter() - started
        control.release("p", request_id, reason="read", timeout_s=timeout_s)
        return seconds


def measure(
    reader: Reader, transport: str, blocks_per_span: int, *, rounds: int, done: Callable[[], None]
) -> Row:
    """GB/s over `rounds` rounds in turning order."""
    plan = arena_plan()
    count = plan.blocks_for(0, TOKENS)
    pull = plan_pull(
        plan,
        remote_groups(geometry_of(plan), [tuple(offsets(plan, blocks_per_span))]),
        [range(count)],
        num_tokens=TOKENS,
        num_local_tokens=0,
    )
    ways = {
        "without": lambda: reader.seconds(pull, str(blocks_per_span), verify=False),
        "verified": lambda: reader.seconds(pull, str(blocks_per_span), verify=True),
        "ahead": lambda: reader.seconds(pull, str(blocks_per_span), verify=True, ahead=True),
    }
    seconds = alternate(ways, rounds, warmups=2, done=done)
    total = pull.attention_bytes
    speeds = {name: [total / 1e9 / time for time in times] for name, times in seconds.items()}
    return Row(
        transport,
        total // len(pull.spans),
        total,
        {name: Spread.of(values) for name, values in speeds.items()},
        _cost(speeds["verified"], speeds["without"]),
        _cost(speeds["ahead"], speeds["without"]),
    )


def _cost(speeds: Sequence[float], without: Sequence[float]) -> Spread:
    pairs = zip(speeds, without, strict=True)
    return Spread.of([1.0 - speed / plain for speed, plain in pairs])


def run(rounds: int, console: Console) -> list[Row]:
    """All transports and spans."""
    arena = ArenaMemory(arena_plan().arena_bytes)
    transports = [open_transport(name, "bench-d") for name in WAYS]
    rows = []
    total = len(WAYS) * len(BLOCKS_PER_SPAN) * 3 * (rounds + 2)
    with peer_process() as (port, addresses), report.progress(console, total) as tell:
        control = ControlClient(f"127.0.0.1:{port}", token=None, caller_engine_id="d")
        peer = Peer("p", control, DEADLINE_S, geometry_of(arena_plan()), (DIGESTS_XXH3_64,))
        for transport, address in zip(transports, addresses, strict=True):
            transport.register(arena)
            transport.connect("p", address)
            reader = Reader(transport, arena, peer)
            for blocks in BLOCKS_PER_SPAN:
                done = tell(f"{transport.name}, {blocks} blocks per span")
                rows.append(measure(reader, transport.name, blocks, rounds=rounds, done=done))
        control.close()
    for transport in transports:
        transport.close()
    arena.close()
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    judged = row.transport == "nixl" and row.span_bytes == 1 << 20
    met = "met" if row.cost.median <= TARGET else "MISSED"
    return [
        row.transport,
        f"{row.span_bytes >> 10} KiB",
        *(f"{row.speeds[way].median:.1f}" for way in ("without", "verified", "ahead")),
        row.cost.show(),
        row.cost_on_d.show(),
        met if judged else "not judged",
    ]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after two.")] = 15,
    cpu: Annotated[str, typer.Option(help="Cores to run on, as `0,1`, or `all`.")] = "all",
    json: Annotated[Path | None, typer.Option(help="Also write the rows here.")] = None,
) -> None:
    """GB/s of a hand-over with and without verification, in one run."""
    console = Console()
    configure_logging("WARNING")
    host = machine.prepare(cpu)
    rows = run(rounds, console)
    note = f"GB/s, median of {rounds} rounds; {machine.describe(host)}"
    report.publish(console, "Verification", headers=HEADERS, rows=list(map(cells, rows)), note=note)
    report.write_json(json, {"machine": host, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
