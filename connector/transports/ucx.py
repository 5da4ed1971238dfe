"""Reads over UCX without NIXL: tagged messages of several MiB that the owner's thread sends.

Knows peers, parts and what may go wrong between them; ucxx is `ucx_worker.py`'s business. A peer
that vanishes must be noticed, and in that mode UCX 1.21 sends messages over TCP or RDMA, never
through shared memory: on one host `shm` is faster. Without that mode a peer that dies takes the
reading process with it, or writes into the arena after the end of a read (benchmarks/README.md).
"""

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock
from typing import Annotated

import msgspec
import numpy as np

from connector.transports.base import (
    CompletedTransfer,
    SpanPair,
    Transfer,
    TransferStatus,
    Transport,
    check_spans,
    decode_address,
)
from connector.transports.ucx_parts import Part, plan_parts
from connector.transports.ucx_server import (
    REFUSAL_BYTES,
    REQUEST_TAG,
    ArenaServer,
    PartRequest,
    Token,
    WorkerAddress,
    encode_frame,
)
from connector.transports.ucx_worker import Bytes, Request, UcxWorker, wait_readable
from engine.arena import ArenaMemory
from engine.errors import TransferTimeoutError, TransportError

_PARTS_IN_FLIGHT = 4
_NAP_S = 1e-3  # another thread may have taken the event that this one sleeps for
_DRAIN_S = 0.5  # how long a cancelled read may take to end by itself
_TAG_COUNTER = 2**20


class UcxAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="ucx"):
    """A peer's serving worker and its arena; `token` is new in each life and goes into requests.

    `digest` covers the rest: UCX 1.21 aborts the process that parses a damaged worker address.
    That is against damage, not against malice: addresses must come from members of the cluster.
    """

    worker: WorkerAddress
    token: Token
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

    @classmethod
    def of(cls, worker: bytes, token: bytes, nbytes: int) -> "UcxAddress":
        """With its digest."""
        return cls(worker, token, nbytes, _digest(worker, token, nbytes))

    @classmethod
    def decode(cls, blob: bytes) -> "UcxAddress":
        """Raises TransportError for anything but what `of` made."""
        address = decode_address(blob, cls)
        if address.digest != _digest(address.worker, address.token, address.nbytes):
            raise TransportError("a UcxAddress that does not match its digest: it was damaged")
        return address


def _digest(worker: bytes, token: bytes, nbytes: int) -> bytes:
    whole = worker + token + nbytes.to_bytes(8)
    return hashlib.blake2b(whole, digest_size=16).digest()


@dataclass(slots=True)
class _Flight:
    """A part that was asked for, and those of its messages that have not come, in order.

    `buffer`: where the one message of a joined part arrives; nothing for others.
    """

    part: Part
    messages: deque[Request]
    buffer: Bytes


class UcxTransfer(Transfer):
    """A read as parts, a few of them in flight; runs under the connection's lock."""

    __slots__ = ("_connection", "failure", "flying", "status", "waiting")

    def __init__(self, connection: "_Connection", spans: Sequence[SpanPair]) -> None:
        self._connection = connection
        self.waiting = deque(plan_parts(spans))
        self.flying: list[_Flight] = []
        self.status = TransferStatus.PENDING
        self.failure: str | None = None

    def poll(self) -> TransferStatus:
        with self._connection.lock:
            if self.failure is None and self.status is TransferStatus.PENDING:
                self._connection.advance()
            if self.failure is not None:
                raise TransportError(self.failure)
            return self.status

    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        """For all: parts arrive in no order."""
        if not self._wait_until(time.monotonic() + timeout_s):
            self.cancel()
            raise TransferTimeoutError(f"read over ucx not done after {timeout_s} s")

    def cancel(self) -> None:
        with self._connection.lock:
            if self.status is TransferStatus.DONE or self.failure is not None:
                return
            self.waiting.clear()
        with suppress(TransportError):  # it may fail while it drains: cancelled is cancelled
            self._wait_until(time.monotonic() + _DRAIN_S)
        with self._connection.lock:
            if self.status is TransferStatus.PENDING and self.failure is None:
                self._connection.close("a read from this peer was cancelled")
            self.failure = "the read was cancelled"

    def _wait_until(self, deadline: float) -> bool:
        while self.poll() is TransferStatus.PENDING:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._connection.nap(min(left, _NAP_S))
        return True


class _Connection:
    """One worker that reads from one peer. Apart from all others, because it must be able to die.

    ucxx cancels no single message. So a cancelled read first drains; if the peer does not answer,
    only closing the worker keeps its bytes out of the arena. The next read opens a new one.
    """

    def __init__(self, address: UcxAddress, arena: ArenaMemory, host: str) -> None:
        self.lock = RLock()
        self.closed = False
        self._token = address.token
        self._arena: Bytes = arena.tensor.numpy()
        self._worker = UcxWorker(host)
        self._own_address = self._worker.address()
        self._endpoint = self._worker.connect(address.worker)
        self._tag = secrets.randbits(43) * _TAG_COUNTER  # nobody else can guess a tag of ours
        self._used_tags = 0
        buffer = np.zeros(REFUSAL_BYTES, dtype=np.uint8)
        self._refusal = self._worker.receive(buffer, self._tag)
        self._asking: list[Request] = []
        self._live: list[UcxTransfer] = []

    @property
    def under_way(self) -> tuple[UcxTransfer, ...]:
        """Reads that have neither ended nor failed."""
        return tuple(self._live)

    def start(self, spans: Sequence[SpanPair]) -> UcxTransfer:
        """Ask for the first parts. Raises TransportError with everything released."""
        transfer = UcxTransfer(self, spans)
        with self.lock:
            self._live.append(transfer)
            self.advance()
        return transfer

    def advance(self) -> None:
        """Take what has arrived and ask for more, for all reads; a failure fails them all."""
        if self.closed:
            return
        try:
            self._worker.progress()
            self._check()
            for transfer in tuple(self._live):
                self._land(transfer)
                self._launch(transfer)
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
            for transfer in self._live:
                transfer.failure = reason
            try:
                self._worker.close()
            finally:
                for transfer in self._live:
                    transfer.flying.clear()
                    transfer.waiting.clear()
                self._live.clear()
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
        still = []
        for flight in transfer.flying:
            while flight.messages and self._worker.is_done(flight.messages[0]):
                flight.messages.popleft()
            if flight.messages:
                still.append(flight)
            elif flight.part.joined:
                flight.part.scatter(flight.buffer, self._arena)
        transfer.flying = still
        if not still and not transfer.waiting:
            transfer.status = TransferStatus.DONE
            self._live.remove(transfer)

    def _launch(self, transfer: UcxTransfer) -> None:
        in_flight = sum(len(other.flying) for other in self._live)
        for _ in range(min(_PARTS_IN_FLIGHT - in_flight, len(transfer.waiting))):
            part = transfer.waiting.popleft()
            tag = self._take_tags(len(part.spans))
            transfer.flying.append(self._expect(part, tag))
            spans = [(span.remote, span.length) for span in part.spans]
            request = PartRequest(
                self._token, self._own_address, tag, self._tag, spans, joined=part.joined
            )
            frame = encode_frame(request)
            self._asking.append(self._worker.send(self._endpoint, frame, REQUEST_TAG))

    def _expect(self, part: Part, tag: int) -> _Flight:
        """A joined part comes at `tag` into a buffer, the spans of others from `tag` on."""
        buffer = np.empty(part.nbytes if part.joined else 0, dtype=np.uint8)
        targets = [buffer] if part.joined else [self._target(span) for span in part.spans]
        messages = [self._worker.receive(target, tag + i) for i, target in enumerate(targets)]
        return _Flight(part, deque(messages), buffer)

    def _target(self, span: SpanPair) -> Bytes:
        return self._arena[span.local : span.local + span.length]

    def _take_tags(self, count: int) -> int:
        """The first of `count` tags in a row."""
        if self._used_tags + count >= _TAG_COUNTER:
            self._used_tags = 0
        first = self._tag + 1 + self._used_tags
        self._used_tags += count
        return first


@dataclass(slots=True)
class _Peer:
    blob: bytes
    address: UcxAddress
    connection: _Connection


class UcxTransport(Transport):
    """Host arenas, one host or many. Raises ConfigError when ucxx is not installed.

    `host`: the address of this machine that peers use; only its interface listens.
    """

    name = "ucx"

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        self.agent_name = agent_name
        self._host = host
        self._lock = RLock()
        self._arena: ArenaMemory | None = None
        self._server: ArenaServer | None = None
        self._address: UcxAddress | None = None
        self._peers: dict[str, _Peer] = {}

    def register(self, arena: ArenaMemory) -> None:
        if self._arena is not None:
            raise TransportError(
                "this transport has an arena already; open one transport per arena"
            )
        if arena.fd is None:
            raise TransportError(
                "ucx moves host memory only; use the nixl transport for a CUDA arena"
            )
        server = ArenaServer(arena, self._host)
        self._address = UcxAddress.of(server.start(), server.token, arena.nbytes)
        self._server, self._arena = server, arena

    @property
    def address(self) -> bytes:
        if self._address is None:
            raise TransportError("no arena is registered")
        return msgspec.msgpack.encode(self._address)

    def connect(self, peer: str, address: bytes) -> None:
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known.blob == address:
                return
            decoded = UcxAddress.decode(address)
            self._check_worker(peer, decoded)
            self.disconnect(peer)
            self._peers[peer] = _Peer(address, decoded, self._open(decoded))

    def read(self, peer: str, spans: Sequence[SpanPair]) -> Transfer:
        with self._lock:
            known = self._peers.get(peer)
            if known is None or self._arena is None:
                raise TransportError(f"peer {peer!r} is not connected")
            nbytes = self._arena.nbytes
            check_spans(spans, remote_nbytes=known.address.nbytes, local_nbytes=nbytes)
            if not spans:
                return CompletedTransfer()
            if known.connection.closed:
                known.connection = self._open(known.address)
            connection = known.connection
        return connection.start(spans)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            known.connection.close(f"{peer!r} was disconnected")

    def close(self) -> None:
        """Lets reads under way end first, so that peers owe nothing to a reader that has left."""
        with self._lock:
            peers, self._peers = self._peers, {}
            server, self._server, self._arena = self._server, None, None
        for known in peers.values():
            for transfer in known.connection.under_way:
                transfer.cancel()
            known.connection.close("the transport was closed")
        if server is not None:
            server.close()

    def _open(self, address: UcxAddress) -> _Connection:
        if self._arena is None:
            raise TransportError("register an arena before connecting to peers")
        return _Connection(address, self._arena, self._host)

    def _check_worker(self, peer: str, address: UcxAddress) -> None:
        for name, entry in self._peers.items():
            if name != peer and entry.address.worker == address.worker:
                raise TransportError(f"{peer!r} announces the worker of {name!r}")
