"""The points of a hand-over where a test may break something, and nodes that pass them.

The product knows none of it: D's points lie in a transport around the real one, P's in a control
service over the real handler. Knows neither what is broken nor requests.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, Final

from connector.pd.connector import PdConnector
from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.control_service import ControlService
from connector.pd.wire.lease_record import REGION
from connector.transports.base import SpanPair, Transfer, Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from serving.config import KVTransferConfig
from serving.node.connector import Build, NodeParts
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.server import RpcService


class FaultPoint(Enum):
    """The points of a hand-over: on D from read to confirmation, on P around its answers.

    A pull passes BEFORE_READ once, AFTER_READ with every stage, and BEFORE_CONFIRM before it reads
    the lease's record. AFTER_RELEASE: the lease has ended, nobody knows yet.
    """

    BEFORE_HANDSHAKE = auto()
    BEFORE_READ = auto()
    AFTER_READ = auto()
    BEFORE_CONFIRM = auto()
    BEFORE_DIGESTS = auto()
    BEFORE_RELEASE = auto()
    AFTER_RELEASE = auto()


@dataclass(slots=True, frozen=True)
class FaultScene:
    """The things in reach: with reads spans and D's arena, with P's answers a name.

    `request_id` is P's name of the prefill, `reader` the engine id of the D that shakes hands.
    """

    request_id: str = ""
    reader: str = ""
    spans: Sequence[SpanPair] = ()
    memory: memoryview = field(default_factory=lambda: memoryview(b""))


class FaultInjector:
    """One fault, or a plan of many; this one has none."""

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        """May wait, write into `scene.memory` or raise a TandemError; on the thread that works."""


NO_FAULTS: Final = FaultInjector()


class FaultyTransfer(Transfer):
    """A read of the arena: what has come may change before anybody looks at it."""

    def __init__(
        self,
        inner: Transfer,
        spans: Sequence[SpanPair],
        memory: memoryview,
        *,
        faults: FaultInjector,
    ) -> None:
        self._inner = inner
        self._spans = spans
        self._memory = memory
        self._faults = faults
        self._seen = 0

    def poll(self) -> bool:
        return self._inner.poll()

    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        self._inner.wait(timeout_s, nbytes)
        start, self._seen = self._seen, nbytes or sum(span.length for span in self._spans)
        came = tuple(part(self._spans, start, self._seen))
        self._faults.at(FaultPoint.AFTER_READ, FaultScene(spans=came, memory=self._memory))

    def cancel(self) -> None:
        self._inner.cancel()


class FaultyTransport(Transport):
    """Another transport, with D's points."""

    def __init__(self, inner: Transport, faults: FaultInjector) -> None:
        self.name = inner.name
        self.inner = inner
        self.faults = faults
        self._regions: Sequence[ArenaMemory] = ()

    @property
    def address(self) -> bytes:
        return self.inner.address

    def register(self, *regions: ArenaMemory) -> None:
        self._regions = regions
        self.inner.register(*regions)

    def listens_at(self, address: bytes) -> str | None:
        return self.inner.listens_at(address)

    def connect(self, peer: str, address: bytes) -> None:
        self.inner.connect(peer, address)

    def read(self, peer: str, spans: Sequence[SpanPair], region: int = 0) -> Transfer:
        if region == REGION:
            self.faults.at(FaultPoint.BEFORE_CONFIRM, FaultScene())
            return self.inner.read(peer, spans, region)
        memory = self._regions[region].host_bytes()
        self.faults.at(FaultPoint.BEFORE_READ, FaultScene(spans=spans, memory=memory))
        transfer = self.inner.read(peer, spans, region)
        return FaultyTransfer(transfer, spans, memory, faults=self.faults)

    def disconnect(self, peer: str) -> None:
        self.inner.disconnect(peer)

    def close(self) -> None:
        self.inner.close()


class FaultyControl(ControlService):
    """P's control service, with P's points."""

    def __init__(self, handler: ControlHandler, faults: FaultInjector) -> None:
        super().__init__(handler)
        self._faults = faults

    async def Handshake(self, request: pb.HandshakeRequest, context: object) -> pb.HandshakeReply:
        await self._at(FaultPoint.BEFORE_HANDSHAKE, FaultScene(reader=request.engine_id))
        return await super().Handshake(request, context)

    async def Digests(self, request: pb.DigestsRequest, context: object) -> pb.DigestsReply:
        await self._at(FaultPoint.BEFORE_DIGESTS, FaultScene(request.request_id))
        return await super().Digests(request, context)

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseReply:
        await self._at(FaultPoint.BEFORE_RELEASE, FaultScene(request.request_id))
        reply = await super().Release(request, context)
        await self._at(FaultPoint.AFTER_RELEASE, FaultScene(request.request_id))
        return reply

    async def _at(self, point: FaultPoint, scene: FaultScene) -> None:
        await asyncio.to_thread(self._faults.at, point, scene)


@dataclass(frozen=True)
class FaultyConnector(PdConnector):
    """The product's, but for the service that peers call."""

    faults: FaultInjector

    def services(self) -> Sequence[RpcService]:
        return [FaultyControl(self.control, self.faults)]


def faulty_builder(config: KVTransferConfig, faults: FaultInjector, stage_bytes: int) -> Build:
    """Builds connectors of nodes whose hand-overs pass all points."""

    def opened(*args: Any, **kwargs: Any) -> FaultyTransport:
        return FaultyTransport(open_transport(*args, **kwargs), faults)

    build = PdConnector.builder(config, open_transport=opened, stage_bytes=stage_bytes)

    def built(node: NodeParts) -> FaultyConnector:
        made = build(node)
        parts = {part.name: getattr(made, part.name) for part in fields(made)}
        return FaultyConnector(**parts, faults=faults)

    return built


def part(spans: Sequence[SpanPair], start: int, end: int) -> Iterator[SpanPair]:
    """Bytes `start` to `end` of all spans together, in their order."""
    before = 0
    for remote, local, length in spans:
        first, stop = max(start - before, 0), min(end - before, length)
        if first < stop:
            yield SpanPair(remote + first, local + first, stop - first)
        before += length
