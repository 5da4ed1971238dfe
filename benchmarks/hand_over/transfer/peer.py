"""The other process: P's arena on every transport, and its control."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from time import monotonic

from benchmarks.hand_over.transfer.cases import ARENA_BYTES, Case, prompts, sizes
from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.control_service import ControlService
from connector.pd.prefill.held_digests import ArenaDigests
from connector.pd.prefill.lease_records import LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.lease_record import REGION_BYTES
from connector.pd.wire.messages import Handshake
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from serving.process import configure_logging
from serving.rpc.server import start_server

FILL = 7
OURS = ("shm", "nixl", "ucx", "zmq")  # NIXL before ucx: opened after it, NIXL is slower
ENGINE_ID = "bench-p"
HOLDING = bytes(32)
DEADLINE_S = 60.0
LEASE_S = 600.0

Addresses = tuple[dict[str, bytes], dict[str, int]]
"""Of the transports by name, and of the control services by case."""


@contextmanager
def peer_addresses() -> Iterator[Addresses]:
    """Addresses of a peer process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(DEADLINE_S)


def _serve(pipe: Connection) -> None:
    configure_logging("warning")
    arena, records = ArenaMemory(ARENA_BYTES), ArenaMemory(REGION_BYTES)
    arena.tensor.fill_(FILL)
    transports = [open_transport(name, ENGINE_ID) for name in OURS]
    for transport in transports:
        transport.register(arena, records)
    addresses = {transport.name: transport.address for transport in transports}
    asyncio.run(
        _answer(pipe, arena, LeaseRecords(records.host_bytes().cast("Q")), addresses=addresses)
    )
    for transport in transports:
        transport.close()
    arena.close()
    records.close()


async def _answer(
    pipe: Connection, arena: ArenaMemory, records: LeaseRecords, *, addresses: dict[str, bytes]
) -> None:
    """One control service per case, for each has a plan of its own."""
    ports: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        for case in prompts() + sizes():
            digests = ArenaDigests(case.plan, arena.digests)
            stack.callback(digests.close)
            service = ControlService(_handler(case, digests, records))
            server = await start_server([service], "127.0.0.1", 0, token=None)
            stack.push_async_callback(server.close)
            ports[case.name] = server.port
        pipe.send((addresses, ports))
        await asyncio.to_thread(pipe.poll, None)


def _handler(case: Case, digests: ArenaDigests, records: LeaseRecords) -> ControlHandler:
    """Grants a released lease anew."""
    leases = LeaseTable(LEASE_S, monotonic, records, digests=digests)

    def grant() -> None:
        leases.grant(case.name, case.remote, case.num_tokens, holding=HOLDING)

    grant()
    identity = Handshake(
        engine_id=ENGINE_ID,
        transport="",
        transport_address=b"",
        geometry={},
        lease_s=LEASE_S,
    )
    return ControlHandler(identity.engine_id, lambda *_: identity, leases, wake=grant)
