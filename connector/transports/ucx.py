"""Reads over UCX without NIXL: tagged messages of several MiB that the owner's thread sends.

Knows peers, parts and what may go wrong between them; ucxx is `ucx_worker.py`'s business. A peer
that vanishes must be noticed, and in that mode UCX 1.21 sends messages over TCP or RDMA, never
through shared memory: on one host `shm` is faster. Without that mode a peer that dies takes the
reading process with it, or writes into the arena after the end of a read
(benchmarks/pages/transfer.md).
"""

import ctypes
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from threading import RLock

import numpy as np

from connector.transports.address import decode_address
from connector.transports.arena_transport import ArenaTransport, RemoteMemory
from connector.transports.base import SpanPair, Transfer, cut, gather
from connector.transports.polled_transfer import DrainedTransfer
from connector.transports.ucx_server import (
    MAX_PART_SPANS,
    REFUSAL_BYTES,
    REQUEST_TAG,
    ArenaServer,
    PartRequest,
    UcxAddress,
    encode_frame,
)
from connector.transports.ucx_worker import Bytes, Request, UcxWorker, wait_readable
from engine.arena import ArenaMemory
from engine.errors import TransportError

PART_BYTES = 2 << 20
DIRECT_BYTES = 256 * 1024
"""Spans from here on arrive in the arena itself, smaller ones together through a buffer."""
_PARTS_IN_FLIGHT = 4
_NAP_S = 1e-3  # another thread may have taken the event that this one sleeps for


@dataclass(slots=True, frozen=True)
class Part:
    """Spans that are asked for together; joined they travel as one message, else each as its own.

    So many spans cost one request, and no large one is copied to be sent or received.
    """

    spans: tuple[SpanPair, ...]
    joined: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(span.length for span in self.spans)

    def scatter(self, buffer: Bytes, arena: Bytes) -> None:
        """From the one message to where the spans belong."""
        source, target = buffer.ctypes.data, arena.ctypes.data
        for span in self.spans:
            ctypes.memmove(target + span.local, source, span.length)
            source += span.length


def plan_parts(spans: Sequence[SpanPair]) -> Iterator[Part]:
    """Every byte in one part; spans are cut at PART_BYTES, and the large ones come first."""
    pieces = list(cut(spans, PART_BYTES))
    for joined in (False, True):
        alike = (piece for piece in pieces if (piece.length < DIRECT_BYTES) is joined)
        for batch in gather(alike, most_bytes=PART_BYTES, most_spans=MAX_PART_SPANS):
            yield Part(tuple(batch), joined and len(batch) > 1)


@dataclass(slots=True)
class _Flight:
    """A part that was asked for, and those of its messages that have not come, in order."""

    part: Part
    messages: deque[Request]


class UcxTransfer(DrainedTransfer[Part]):
    """A read as parts, a few of them in flight; runs under the connection's lock.

    Parts arrive in no order, so that to wait for the first bytes is to wait for all.
    """

    def __init__(
        self, connection: "_Connection", peer: str, spans: Sequence[SpanPair], region: int
    ) -> None:
        super().__init__(peer, sum(span.length for span in spans), connection.lock)
        self._connection = connection
        self.region = region
        self.waiting.extend(plan_parts(spans))
        self.flying: list[_Flight] = []

    def _advance(self, wanted: int) -> None:
        self._connection.advance()

    def _pause(self, waited_s: float, left_s: float) -> None:
        self._connection.nap(min(left_s, _NAP_S))

    def _close_connection(self, reason: str) -> None:
        self._connection.close(reason)


class _Connection:
    """One worker that reads from one peer. Apart from all others, because it must be able to die.

    ucxx cancels no single message. So a cancelled read first drains; if the peer does not answer,
    only closing the worker keeps its bytes out of our memory. The next read opens a new one.
    """

    def __init__(self, address: UcxAddress, regions: Sequence[ArenaMemory], host: str) -> None:
        self.lock = RLock()
        self.closed = False
        self._token = address.token
        self._regions: list[Bytes] = [region.tensor.numpy() for region in regions]
        self._worker = UcxWorker(host)
        self._own_address = self._worker.address()
        self._endpoint = self._worker.connect(address.worker)
        self._refusal_tag = secrets.randbits(62)  # nobody else can guess a tag of ours
        self._next_tag = self._refusal_tag + 1
        buffer = np.zeros(REFUSAL_BYTES, dtype=np.uint8)
        self._refusal = self._worker.receive(buffer, self._refusal_tag)
        self._asking: list[Request] = []
        self.live: list[UcxTransfer] = []  # neither ended nor failed

    def start(self, peer: str, spans: Sequence[SpanPair], region: int) -> UcxTransfer:
        """Ask for the first parts; the transfer tells if that fails."""
        transfer = UcxTransfer(self, peer, spans, region)
        with self.lock:
            self.live.append(transfer)
            self.advance()
        return transfer

    def advance(self) -> None:
        """Take what has arrived and ask for more, for all reads; a failure fails them all."""
        if self.closed:
            return
        try:
            self._worker.progress()
            self._check()
            for transfer in tuple(self.live):
                self._land(transfer)
                # The bound is for the connection: its reads share the peer's one serving thread.
                in_flight = sum(len(other.flying) for other in self.live)
                for _ in range(min(_PARTS_IN_FLIGHT - in_flight, len(transfer.waiting))):
                    self._ask(transfer, transfer.waiting.popleft())
        except TransportError as error:
            self.close(str(error))

    def nap(self, timeout_s: float) -> None:
        """Sleep until something happens, `timeout_s` seconds at most."""
        with self.lock:
            if self.closed or not self._worker.arm():
                return
            fd = self._worker.event_fd
        wait_readable((fd,), timeout_s)

    def close(self, reason: str) -> None:
        """Fail what is under way and give the worker back. Idempotent."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for transfer in self.live:
                transfer.failure = reason
            try:
                self._worker.close()
            finally:
                for transfer in self.live:
                    transfer.flying.clear()
                    transfer.waiting.clear()
                self.live.clear()
                self._asking.clear()
                del self._refusal, self._endpoint

    def _check(self) -> None:
        if self._worker.is_done(self._refusal):
            text = self._refusal.buffer.tobytes().rstrip(b"\0").decode(errors="replace")
            raise TransportError(f"the peer refused a read: {text}")
        if not self._endpoint.alive:
            raise TransportError("the peer closed the connection")
        self._asking = [request for request in self._asking if not self._worker.is_done(request)]

    def _land(self, transfer: UcxTransfer) -> None:
        for flight in transfer.flying:
            # Messages of one part are sent in order, so the first is done first.
            while flight.messages and self._worker.is_done(flight.messages[0]):
                message = flight.messages.popleft()
                if flight.part.joined:
                    flight.part.scatter(message.buffer, self._regions[transfer.region])
        transfer.flying = [flight for flight in transfer.flying if flight.messages]
        if not transfer.flying and not transfer.waiting:
            transfer.is_done = True
            self.live.remove(transfer)

    def _ask(self, transfer: UcxTransfer, part: Part) -> None:
        memory = self._regions[transfer.region]
        if part.joined:
            targets = [np.empty(part.nbytes, dtype=np.uint8)]
        else:
            targets = [memory[span.local : span.local + span.length] for span in part.spans]
        # The tags of one part follow each other.
        tag = self._next_tag
        self._next_tag += len(targets)
        messages = deque(map(self._worker.receive, targets, count(tag)))
        transfer.flying.append(_Flight(part, messages))
        request = PartRequest(
            self._token,
            self._own_address,
            tag,
            self._refusal_tag,
            [(span.remote, span.length) for span in part.spans],
            joined=part.joined,
            region=transfer.region,
        )
        frame = encode_frame(request)
        self._asking.append(self._worker.send(self._endpoint, frame, REQUEST_TAG))


@dataclass(slots=True)
class _Peer(RemoteMemory):
    """`connection`: the last one; a read opens another when that was closed."""

    address: UcxAddress
    connection: _Connection | None = None


class UcxTransport(ArenaTransport[_Peer]):
    """Host memory, one host or many. Raises ConfigError when ucxx is not installed."""

    name = "ucx"
    package = "ucxx"

    def _serve(self) -> ArenaServer:
        return ArenaServer(self._regions, self._host)

    def _decode(self, peer: str, blob: bytes) -> _Peer:
        address = decode_address(blob, UcxAddress)
        return _Peer(peer, blob, address.nbytes, address)

    def _open(self, remote: _Peer) -> None:
        if remote.connection is None or remote.connection.closed:
            remote.connection = _Connection(remote.address, self._regions, self._host)

    def _start(self, remote: _Peer, spans: Sequence[SpanPair], region: int) -> Transfer:
        self._open(remote)
        assert remote.connection is not None
        return remote.connection.start(remote.name, spans, region)

    def _drop(self, remote: _Peer, reason: str) -> None:
        if remote.connection is not None:
            remote.connection.close(reason)
