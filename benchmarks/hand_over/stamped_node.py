"""One real node in a process of its own, which notes when each step of a hand-over happened.

The node is the product's; only its connector is wrapped, at interfaces that the product has anyway.
Times are CLOCK_MONOTONIC seconds, which all processes of one machine share.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple

from connector.pd.connector import PdConnector
from connector.pd.wire.lease_record import REGION
from connector.transports.base import SpanPair, Transfer, Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.kv_connector import (
    AdmissionConnector,
    Admitted,
    Connector,
    FinishDecision,
    Match,
    SchedulerConnector,
    WorkerConnector,
)
from engine.request import Request
from engine.step import BlockLoad, ConnectorMeta, ConnectorOutput, ScheduledRequest
from engine.types import GenerateRequest, HandOverProblem
from serving.config import KVTransferConfig, NodeConfig
from serving.node.connector import Build, NodeParts
from serving.node.server import NodeServer
from serving.process import configure_logging

START_S = 120.0
STOP_S = 30.0


class Stamp(NamedTuple):
    """An event, its time (monotonic seconds), and P's name of the prefill where it is known."""

    name: str
    at: float
    request_id: str = ""


class Stamps:
    """Everything noted since the last `take`."""

    def __init__(self) -> None:
        self._noted: list[Stamp] = []

    def note(self, name: str, request_id: str = "") -> None:
        """Notes that `name` happens now."""
        self._noted.append(Stamp(name, monotonic(), request_id))

    def take(self) -> list[Stamp]:
        """Takes the stamps noted since the last call."""
        taken, self._noted = self._noted, []
        return taken


@dataclass(slots=True, frozen=True)
class StampedAdmission(AdmissionConnector):
    """`admit` and `admitted`."""

    inner: AdmissionConnector
    stamps: Stamps

    async def admit(self, request: GenerateRequest) -> Admitted:
        self.stamps.note("admit")
        admitted = await self.inner.admit(request)
        self.stamps.note("admitted")
        return admitted

    def withdraw(self, request_id: str) -> None:
        self.inner.withdraw(request_id)

    def problems(self) -> tuple[HandOverProblem, ...]:
        return self.inner.problems()


@dataclass(slots=True, frozen=True)
class StampedScheduler(SchedulerConnector):
    """`finished`: a request's last output can be made."""

    inner: SchedulerConnector
    stamps: Stamps

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        return self.inner.match(request, num_local_tokens)

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        return self.inner.start_load(request, load)

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        return self.inner.build_meta(scheduled)

    def update(self, output: ConnectorOutput) -> None:
        self.inner.update(output)

    def request_finished(self, request: Request) -> FinishDecision:
        decision = self.inner.request_finished(request)
        self.stamps.note("finished", request.request_id)
        return decision

    def end_hold(self, request_id: str | None) -> str | None:
        return self.inner.end_hold(request_id)

    def close(self) -> None:
        self.inner.close()


@dataclass(slots=True, frozen=True)
class StampedWorker(WorkerConnector):
    """`pull` for each pull begun, `execute` and `executed` around the forward, `loaded`."""

    inner: WorkerConnector
    stamps: Stamps

    def start_load(self, message: Any) -> None:
        for _ in message:
            self.stamps.note("pull")
        self.inner.start_load(message)
        self.stamps.note("execute")

    def get_finished(self) -> ConnectorOutput:
        self.stamps.note("executed")
        output = self.inner.get_finished()
        for _ in output.loaded:
            self.stamps.note("loaded")
        return output

    def next_deadline(self) -> float | None:
        return self.inner.next_deadline()

    def close(self) -> None:
        self.inner.close()


class StampedTransport(Transport):
    """`before_read` for each read of blocks, `before_confirm` for each of a lease's record."""

    def __init__(self, inner: Transport, stamps: Stamps) -> None:
        self.name = inner.name
        self._inner = inner
        self._stamps = stamps

    @property
    def address(self) -> bytes:
        return self._inner.address

    def register(self, *regions: ArenaMemory) -> None:
        self._inner.register(*regions)

    def listens_at(self, address: bytes) -> str | None:
        return self._inner.listens_at(address)

    def connect(self, peer: str, address: bytes) -> None:
        self._inner.connect(peer, address)

    def read(self, peer: str, spans: Sequence[SpanPair], region: int = 0) -> Transfer:
        self._stamps.note("before_confirm" if region == REGION else "before_read")
        return self._inner.read(peer, spans, region)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True, frozen=True)
class StampedBuilder:
    """`serving.node.connector.BuilderOf`."""

    stamps: Stamps

    def __call__(self, config: KVTransferConfig) -> Build:
        """Builds the product's connector, watched."""

        def opened(*args: Any, **kwargs: Any) -> StampedTransport:
            return StampedTransport(open_transport(*args, **kwargs), self.stamps)

        build = PdConnector.builder(config, open_transport=opened)

        def watched(node: NodeParts) -> PdConnector:
            made = build(node)
            sides = Connector(
                StampedAdmission(made.connector.admission, self.stamps),
                StampedScheduler(made.connector.scheduler, self.stamps),
                StampedWorker(made.connector.worker, self.stamps),
            )
            return replace(made, connector=sides)

        return watched


@dataclass(slots=True, frozen=True)
class NodeProcess:
    """A node that serves in another process."""

    grpc_port: int
    pipe: Connection

    def take(self) -> list[Stamp]:
        """Takes the stamps that the node noted since the last call."""
        self.pipe.send("take")
        if not self.pipe.poll(STOP_S):
            raise RuntimeError("the node's process does not answer")
        stamps: list[Stamp] = self.pipe.recv()
        return stamps


def serve(pipe: Connection, config: NodeConfig, kind: str) -> None:
    """The process: a node, until the pipe closes."""
    configure_logging("warning")
    asyncio.run(_serve(pipe, config, kind))


async def _serve(pipe: Connection, config: NodeConfig, kind: str) -> None:
    stamps = Stamps()
    node = NodeServer(config, kind, StampedBuilder(stamps))
    await node.start()
    pipe.send(node.rpc.port)
    try:
        while await asyncio.to_thread(_asked, pipe):
            pipe.send(stamps.take())
    finally:
        await node.close()


def _asked(pipe: Connection) -> bool:
    """Whether there was a question; False when nobody will ask again."""
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


@contextmanager
def node_process(config: NodeConfig, kind: str) -> Iterator[NodeProcess]:
    """A node in a process that ends with the block. RuntimeError when it does not serve in time."""
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, config, kind))
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the {kind} node does not serve")
        yield NodeProcess(ours.recv(), ours)
    finally:
        ours.close()
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
