"""One real node in a process of its own, which notes when each step of a hand-over happened.

The node is the product's; only its connector is wrapped, at interfaces that the product has anyway.
Times are CLOCK_MONOTONIC seconds, which all processes of one machine share.
"""

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple

from connector.pd.connector import PdBuilder, PdConnector
from connector.pd.faults import FaultInjector, FaultScene
from connector.pd.faults import FaultPoint as Point
from connector.pd.prefill.control_service import ControlService, KvControl
from connector.pd.wire.messages import BlockRange, Digests, Handshake, HeldBlocks
from engine.config import KVTransferConfig, NodeConfig
from engine.kv_connector import (
    AdmissionConnector,
    Admitted,
    Connector,
    FinishDecision,
    Match,
    SchedulerConnector,
    WorkerConnector,
)
from engine.node.connector import ConnectorBuilder
from engine.node.server import NodeServer
from engine.process import configure_logging
from engine.request import Request
from engine.rpc.server import RpcService
from engine.step import BlockLoad, ConnectorMeta, ConnectorOutput, ScheduledRequest
from engine.types import GenerateRequest, HandOverProblem

START_S = 120.0
STOP_S = 30.0


class Stamp(NamedTuple):
    """What happened, when (monotonic seconds), and P's name of the prefill where it is known."""

    name: str
    at: float
    request_id: str = ""


class Stamps(FaultInjector):
    """Everything noted since the last `take`; a fault injector that only looks."""

    def __init__(self) -> None:
        self._noted: list[Stamp] = []

    def note(self, name: str, request_id: str = "") -> None:
        """`name` happened now."""
        self._noted.append(Stamp(name, monotonic(), request_id))

    def take(self) -> list[Stamp]:
        """What was noted since the last call."""
        taken, self._noted = self._noted, []
        return taken

    def at(self, point: Point, scene: FaultScene) -> None:
        """A named point of the pull thread: `before_read`, `after_read`, `before_confirm` ..."""
        self.note(point.name.lower(), scene.request_id)


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


@dataclass(slots=True, frozen=True)
class StampedControl:
    """P's answers: `claim` and `claimed`, `digests` and `digested`, `release` and `released`."""

    inner: KvControl
    stamps: Stamps

    def handshake(self, caller_engine_id: str) -> Handshake:
        return self.inner.handshake(caller_engine_id)

    def claim(self, engine_id: str, request_id: str, caller_engine_id: str) -> HeldBlocks:
        self.stamps.note("claim")
        claim = self.inner.claim(engine_id, request_id, caller_engine_id)
        self.stamps.note("claimed")
        return claim

    def renew(
        self,
        engine_id: str,
        caller_engine_id: str,
        request_ids: Sequence[str],
        *,
        generations: Sequence[int],
    ) -> Sequence[str]:
        return self.inner.renew(engine_id, caller_engine_id, request_ids, generations=generations)

    def release(self, engine_id: str, request_id: str, reason: str, *, generation: int) -> bool:
        self.stamps.note("release")
        was_alive = self.inner.release(engine_id, request_id, reason, generation=generation)
        self.stamps.note("released")
        return was_alive

    def digests(
        self,
        engine_id: str,
        request_id: str,
        generation: int,
        *,
        ranges: Sequence[BlockRange],
        left: threading.Event,
    ) -> Digests:
        self.stamps.note("digests")
        digests = self.inner.digests(engine_id, request_id, generation, ranges=ranges, left=left)
        self.stamps.note("digested")
        return digests


@dataclass(slots=True, frozen=True)
class StampedConnector:
    """The product's connector with all its doors watched; `engine.node.connector.NodeConnector`."""

    inner: PdConnector
    stamps: Stamps

    @property
    def connector(self) -> Connector:
        """The three sides."""
        sides = self.inner.connector
        return Connector(
            StampedAdmission(sides.admission, self.stamps),
            StampedScheduler(sides.scheduler, self.stamps),
            StampedWorker(sides.worker, self.stamps),
        )

    def services(self) -> Sequence[RpcService]:
        """The control service."""
        return [ControlService(StampedControl(self.inner.control, self.stamps))]

    def advertise(self, port: int) -> None:
        self.inner.advertise(port)

    def is_awaited(self) -> bool:
        return self.inner.is_awaited()

    def close(self) -> None:
        self.inner.close()


@dataclass(slots=True, frozen=True)
class StampedBuilder:
    """`engine.node.connector.BuilderOf`."""

    stamps: Stamps

    def __call__(self, config: KVTransferConfig) -> ConnectorBuilder:
        """Builds the product's connector, watched."""
        build = PdBuilder(PdBuilder.of(config).extra, self.stamps)

        def watched(*args: Any, **kwargs: Any) -> StampedConnector:
            return StampedConnector(build(*args, **kwargs), self.stamps)

        return watched


@dataclass(slots=True, frozen=True)
class NodeProcess:
    """A node that serves in another process."""

    grpc_port: int
    pipe: Connection

    def take(self) -> list[Stamp]:
        """What the node noted since the last call."""
        self.pipe.send("take")
        if not self.pipe.poll(STOP_S):
            raise RuntimeError("the node's process does not answer")
        stamps: list[Stamp] = self.pipe.recv()
        return stamps


def serve(pipe: Connection, config: NodeConfig, kind: str) -> None:
    """The process: a node, until the pipe closes."""
    configure_logging("WARNING")
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
