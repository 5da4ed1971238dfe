"""Reads over ZeroMQ: plain TCP anywhere, without special hardware or settings.

The reader asks and a thread of the owner answers, a bounded number of bytes at a time. Bytes reach
the arena only inside `poll` and `wait`, so a read that was cancelled cannot write any.
"""

import ipaddress
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from connector.transports.base import (
    CompletedTransfer,
    SpanPair,
    Transfer,
    TransferStatus,
    Transport,
    check_spans,
)
from connector.transports.zmq_link import Context, Link
from connector.transports.zmq_owner import ArenaOwner
from connector.transports.zmq_wire import WINDOW, ZmqAddress, chunks, decode_zmq_address
from engine.arena import ArenaMemory
from engine.errors import TransferTimeoutError, TransportError

_SLICE_S = 0.02  # how long a waiting thread may keep `cancel` of another one waiting
_MAX_IDLE = 8  # connections kept per peer


class ZmqTransfer(Transfer):
    """A read over a connection of its own; `retire` takes the connection back if it is whole."""

    __slots__ = (
        "_asked", "_asking", "_bytes", "_failure", "_here", "_link", "_lock", "_retire",
        "_status", "_stop", "peer",
    )  # fmt: skip

    def __init__(
        self,
        peer: str,
        link: Link,
        spans: Sequence[SpanPair],
        *,
        local: "memoryview[int]",
        retire: Callable[["ZmqTransfer", Link | None], None],
    ) -> None:
        self.peer = peer
        self._link = link
        self._bytes = local
        self._retire = retire
        self._lock = threading.Lock()
        self._asking = chunks(spans)
        self._asked: deque[tuple[int, list[SpanPair]]] = deque()
        self._here = 0  # bytes; answers come in order
        self._status = TransferStatus.PENDING
        self._stop: str | None = None  # set without the lock: a waiting thread looks at it
        self._failure: str | None = None

    def poll(self) -> TransferStatus:
        return self._step(0.0)

    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        left = timeout_s
        while self._step(min(left, _SLICE_S)) is TransferStatus.PENDING:
            if nbytes is not None and self._here >= nbytes:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                self.end(f"the read from {self.peer} ran out of time")
                raise TransferTimeoutError(f"read from {self.peer} not done after {timeout_s} s")

    def cancel(self) -> None:
        self.end(f"the read from {self.peer} was cancelled")

    def end(self, reason: str) -> None:
        """Fail it with `reason`, unless it has ended."""
        self._stop = reason
        with self._lock:
            if self._is_open():
                self._fail(reason)

    def _step(self, pause_s: float) -> TransferStatus:
        """Take what is here and ask for more; if nothing was, look again within `pause_s`."""
        with self._lock:
            if self._failure is not None:
                raise TransportError(self._failure)
            if self._is_open():
                try:
                    self._advance(pause_s)
                except TransportError as error:
                    self._fail(str(error))
                    raise
            return self._status

    def _is_open(self) -> bool:
        return self._status is TransferStatus.PENDING and self._failure is None

    def _advance(self, pause_s: float) -> None:
        if self._stop is not None:
            raise TransportError(self._stop)
        self._ask()
        if not self._take():
            self._link.check()
            if pause_s > 0:
                self._link.pause(pause_s)
        elif not self._asked:
            self._status = TransferStatus.DONE
            self._retire(self, self._link)

    def _ask(self) -> None:
        while len(self._asked) < WINDOW:
            chunk = next(self._asking, None)
            if chunk is None:
                return
            self._asked.append((self._link.ask(chunk), chunk))

    def _take(self) -> bool:
        """At most one window, so that one `poll` ends; True if anything had come."""
        for taken in range(WINDOW):
            if not self._asked or not self._link.take(*self._asked[0], self._bytes):
                return taken > 0
            _, pieces = self._asked.popleft()
            self._here += sum(piece.length for piece in pieces)
            self._ask()
        return True

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._link.close()
        self._retire(self, None)


@dataclass(slots=True, frozen=True)
class _Peer:
    blob: bytes
    address: ZmqAddress
    idle: list[Link] = field(default_factory=list)


class ZmqTransport(Transport):
    """Host arenas, any hosts. `host` is where this node's arena is served: no other address."""

    name = "zmq"

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        self.agent_name = agent_name
        self._host = host
        self._lock = threading.Lock()
        self._context = Context()
        self._owner: ArenaOwner | None = None
        self._bytes: memoryview[int] | None = None
        self._peers: dict[str, _Peer] = {}
        self._live: dict[ZmqTransfer, _Peer] = {}

    def register(self, arena: ArenaMemory) -> None:
        if self._owner is not None:
            raise TransportError(
                "this transport has an arena already; open one transport per arena"
            )
        if arena.device_index is not None:
            raise TransportError(
                "zmq moves host memory only; use the nixl transport for a CUDA arena"
            )
        self._owner = ArenaOwner(self._context, arena, self._host)
        self._bytes = arena.tensor.numpy().data

    @property
    def address(self) -> bytes:
        if self._owner is None:
            raise TransportError("no arena is registered")
        return msgspec.msgpack.encode(self._owner.address)

    def listens_at(self, address: bytes) -> str | None:
        return str(ipaddress.ip_address(decode_zmq_address(address).host))

    def connect(self, peer: str, address: bytes) -> None:
        with self._lock:
            known = self._peers.get(peer)
        if known is None or known.blob != address:
            entry = _Peer(address, decode_zmq_address(address))
            self.disconnect(peer)
            with self._lock:
                self._peers[peer] = entry

    def read(self, peer: str, spans: Sequence[SpanPair]) -> Transfer:
        with self._lock:
            entry, local = self._peers.get(peer), self._bytes
            if entry is None:
                raise TransportError(f"peer {peer!r} is not connected")
            if local is None:
                raise TransportError("register an arena before reading")
            check_spans(spans, remote_nbytes=entry.address.nbytes, local_nbytes=local.nbytes)
            if not spans:
                return CompletedTransfer()
            link = self._take_link(entry)
            transfer = ZmqTransfer(peer, link, spans, local=local, retire=self._retire)
            self._live[transfer] = entry
        transfer.poll()  # asks
        return transfer

    def disconnect(self, peer: str) -> None:
        with self._lock:
            entry = self._peers.pop(peer, None)
            reads = [read for read, source in self._live.items() if source is entry]
        self._drop(entry, reads, f"{peer} was disconnected")

    def close(self) -> None:
        with self._lock:
            self._bytes = None
            peers, self._peers = self._peers, {}
            reads = list(self._live)
        self._drop(None, reads, "the transport was closed")
        for entry in peers.values():
            self._drop(entry, [], "")
        self._context.term()
        if self._owner is not None:
            self._owner.join()

    def _take_link(self, entry: _Peer) -> Link:
        """An idle connection that still stands, else a new one."""
        while entry.idle:
            link = entry.idle.pop()
            try:
                link.check()
            except TransportError:
                link.close()
            else:
                return link
        return Link(self._context, entry.address)

    def _retire(self, read: ZmqTransfer, link: Link | None) -> None:
        with self._lock:
            entry = self._live.pop(read)
            if link is None:
                return
            if self._peers.get(read.peer) is entry and len(entry.idle) < _MAX_IDLE:
                entry.idle.append(link)
            else:
                link.close()

    def _drop(self, entry: _Peer | None, reads: Sequence[ZmqTransfer], reason: str) -> None:
        """Without the transport's lock, which a read takes when it ends."""
        for read in reads:
            read.end(reason)
        while entry is not None and entry.idle:
            entry.idle.pop().close()
