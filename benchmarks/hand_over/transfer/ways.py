"""The ways to move one case: memcpy, NIXL itself, and our pulls.

Each is timed into zeroed memory, and the bytes are checked after every run.
"""

import asyncio
import ctypes
import importlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic, perf_counter, sleep
from typing import Any

import msgspec
import torch

from benchmarks.hand_over.transfer.cases import Case
from benchmarks.hand_over.transfer.peer import DEADLINE_S, ENGINE_ID, FILL, HOLDING
from connector.pd.decode.peer_registry import Peer
from connector.pd.decode.pull_reader import PullReader, Reading
from connector.pd.metrics import TransferMetrics
from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.geometry import geometry_of
from connector.transports.base import SpanPair, Transport
from connector.transports.nixl_agent import NixlAddress
from engine.arena import ArenaMemory
from serving.metrics import NodeMetrics

Read = Callable[[Sequence[SpanPair]], None]

HASHED_PER_S = 4e9
"""Bytes; a cold core does five times as many."""


def memcpy_read(arena: ArenaMemory) -> Read:
    """The ceiling: the same spans out of this process's own memory, on one thread."""
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
        remote = descriptors(peer.regions[0].base, [(span.remote, span.length) for span in spans])
        request = agent.initialize_xfer("READ", local, remote, peer.agent)
        status = agent.transfer(request)
        while status == "PROC":
            status = agent.check_xfer_state(request)
        agent.release_xfer_handle(request)

    return read


@dataclass(slots=True)
class Baseline:
    """Reads the spans of one case, planned before."""

    arena: ArenaMemory
    case: Case
    read: Read

    def __call__(self) -> float:
        """Seconds of one run."""
        spans = self.case.pull().spans
        with emptied(self.arena, spans):
            started = perf_counter()
            self.read(spans)
            return perf_counter() - started


OnLoop = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def event_loop() -> Iterator[OnLoop]:
    """An event loop on a thread of its own, as a node has one; waits for what it is given."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="loop")
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(DEADLINE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass(slots=True)
class Pull:
    """One case as a pull thread reads it: plan, read, and compare with P's digests or not.

    P, which hashes from its answer on, has done so: between that and a read lie a proxy and D's
    queue, and here a pause for all that is pulled, verified or not.
    """

    arena: ArenaMemory
    records: ArenaMemory
    case: Case
    transport: Transport
    control: ControlClient
    on_loop: OnLoop
    verify: bool
    reader: PullReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = PullReader(
            self.transport,
            self.arena,
            self.records,
            verify=self.verify,
            metrics=TransferMetrics(NodeMetrics("bench", "d")),
        )

    def __call__(self) -> float:
        """Seconds of one run, under a lease that P grants anew."""
        case, control = self.case, self.control
        geometry = geometry_of(case.plan)
        peer = Peer(ENGINE_ID, ENGINE_ID, control, geometry, DEADLINE_S)
        plan = case.pull()
        with emptied(self.arena, plan.spans):
            claim = self.on_loop(control.claim(ENGINE_ID, case.name))
            sleep(case.nbytes / HASHED_PER_S)
            deadline = monotonic() + DEADLINE_S
            started = perf_counter()
            reading = Reading(peer, case.name, claim.generation, HOLDING, deadline)
            self.reader.read(reading, case.pull())
            seconds = perf_counter() - started
        self.on_loop(
            control.release(ENGINE_ID, case.name, reason="read", generation=claim.generation)
        )
        return seconds


@contextmanager
def emptied(arena: ArenaMemory, spans: Sequence[SpanPair]) -> Any:
    """Zeroes what is read; raises RuntimeError unless every byte has arrived at the end."""
    targets = [arena.tensor[span.local : span.local + span.length] for span in spans]
    for target in targets:
        target.zero_()
    yield
    if not all(bool((target == FILL).all()) for target in targets):
        raise RuntimeError("the bytes did not arrive")
