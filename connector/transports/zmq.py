"""Reads over ZeroMQ: plain TCP anywhere, without special hardware or settings.

The reader asks and a thread of the owner answers, a bounded number of bytes at a time. Bytes reach
our memory only inside `poll` and `wait`, so a read that was cancelled cannot write any.
"""

import ipaddress
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from connector.transports.arena_transport import ArenaTransport, RemoteMemory
from connector.transports.base import SpanPair, Transfer, TransferStatus
from connector.transports.polled_transfer import PolledTransfer
from connector.transports.zmq_link import Context, Link
from connector.transports.zmq_owner import ArenaOwner
from connector.transports.zmq_wire import WINDOW, ZmqAddress, chunks, decode_zmq_address
from engine.arena import ArenaMemory
from engine.errors import TransportError

_SLICE_S = 0.02  # how long a waiting thread may keep `cancel` of another one waiting
_MAX_IDLE = 8  # connections kept per peer


@dataclass(slots=True)
class _Peer(RemoteMemory):
    """`reads` that are under way, each with a connection of its own, and `idle` connections.

    `lock` guards both. It is the last in the order of locks: a read takes it when it ends.
    """

    name: str
    address: ZmqAddress
    reads: "set[ZmqTransfer]" = field(default_factory=set)
    idle: list[Link] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_dropped: bool = False

    def take_link(self, context: Context) -> Link:
        """An idle connection that still stands, else a new one."""
        while self.idle:
            link = self.idle.pop()
            try:
                link.check()
            except TransportError:
                link.close()
            else:
                return link
        return Link(context, self.address)

    def retire(self, read: "ZmqTransfer", link: Link | None) -> None:
        """`read` has ended; `link` is whole and free again, or None."""
        with self.lock:
            self.reads.discard(read)
            if link is not None and not self.is_dropped and len(self.idle) < _MAX_IDLE:
                self.idle.append(link)
            elif link is not None:
                link.close()

    def drop(self, reason: str) -> None:
        """Fail the reads and close the idle connections."""
        with self.lock:
            self.is_dropped = True
            reads = list(self.reads)
        for read in reads:
            read.end(reason)
        while self.idle:
            self.idle.pop().close()


class ZmqTransfer(PolledTransfer):
    """A read over a connection of its own, a window of requests at a time."""

    def __init__(
        self, source: _Peer, link: Link, spans: Sequence[SpanPair], *, local: ArenaMemory,
        region: int,
    ) -> None:  # fmt: skip
        super().__init__(source.name, sum(span.length for span in spans), threading.Lock())
        self._source = source
        self._link = link
        self._local = local
        self._region = region
        self._asking = chunks(spans)
        self._asked: deque[tuple[int, list[SpanPair]]] = deque()  # answers come in order
        self._is_idle = False  # the last step found nothing
        self._stop: str | None = None  # set without the lock: a waiting thread looks at it

    def cancel(self) -> None:
        self.end(f"the read from {self.peer} was cancelled")

    def end(self, reason: str) -> None:
        """Fail the read with `reason`, unless it has ended."""
        # A thread that waits holds the lock for up to a slice: it sees this and fails by itself.
        self._stop = reason
        with self._lock:
            if self.is_open:
                self._fail(reason)

    def _advance(self, wanted: int) -> None:
        try:
            if self._stop is not None:
                raise TransportError(self._stop)
            self._ask()
            self._is_idle = not self._take()
            if self._is_idle:
                self._link.check()
            elif not self._asked:
                self.status = TransferStatus.DONE
                self._source.retire(self, self._link)
        except TransportError as error:
            self._fail(str(error))

    def _pause(self, waited_s: float, left_s: float) -> None:
        with self._lock:
            if self._is_idle and self.is_open:
                self._link.pause(min(left_s, _SLICE_S))

    def _ask(self) -> None:
        while len(self._asked) < WINDOW:
            chunk = next(self._asking, None)
            if chunk is None:
                return
            self._asked.append((self._link.ask(chunk, self._region), chunk))

    def _take(self) -> bool:
        """At most one window, so that one `poll` ends; True if anything had come."""
        # Answers come in the order of the requests, so only the first can have come.
        for taken in range(WINDOW):
            if not self._asked or not self._link.take(*self._asked[0], self._local):
                return taken > 0
            _, pieces = self._asked.popleft()
            self.here += sum(piece.length for piece in pieces)
            self._ask()
        return True

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._link.close()
        self._source.retire(self, None)


class ZmqTransport(ArenaTransport[_Peer]):
    """Any memory, any hosts; bytes of a device pass through the host."""

    name = "zmq"
    moves_devices = True

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        super().__init__(agent_name, host)
        self._context = Context()
        self._owner: ArenaOwner | None = None

    def listens_at(self, address: bytes) -> str | None:
        return str(ipaddress.ip_address(decode_zmq_address(address).host))

    def _serve(self) -> None:
        self._owner = ArenaOwner(self._context, self._regions, self._host)

    def _own_address(self) -> bytes:
        assert self._owner is not None
        return msgspec.msgpack.encode(self._owner.address)

    def _decode(self, peer: str, blob: bytes) -> _Peer:
        address = decode_zmq_address(blob)
        return _Peer(blob, address.nbytes, peer, address)

    def _start(self, remote: _Peer, spans: Sequence[SpanPair], region: int) -> Transfer:
        local = self._regions[region]
        with remote.lock:
            link = remote.take_link(self._context)
            transfer = ZmqTransfer(remote, link, spans, local=local, region=region)
            remote.reads.add(transfer)
        transfer.poll()  # asks
        return transfer

    def _drop(self, remote: _Peer, reason: str) -> None:
        remote.drop(reason)

    def _stop(self) -> None:
        self._context.term()  # ends the owner's thread
        if self._owner is not None:
            self._owner.join()
