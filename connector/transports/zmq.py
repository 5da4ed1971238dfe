"""Reads over ZeroMQ: plain TCP anywhere, without special hardware or settings.

The reader asks and a thread of the owner answers, a bounded number of bytes at a time. Bytes reach
our memory only inside `poll` and `wait`, so a read that was cancelled cannot write any.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from connector.transports.address import decode_address
from connector.transports.arena_transport import ArenaTransport, RemoteMemory
from connector.transports.base import SpanPair, Transfer, cut, gather
from connector.transports.polled_transfer import PolledTransfer
from connector.transports.zmq_owner import (
    CHUNK_BYTES,
    CHUNK_PIECES,
    HANDSHAKE_S,
    HIGH_WATER,
    MAX_HEADER_BYTES,
    USER,
    WINDOW,
    AnswerHeader,
    ArenaOwner,
    Context,
    PieceRequest,
    ZmqAddress,
    endpoint,
)
from engine.arena import ArenaMemory
from engine.errors import TransportError
from engine.struct_types import learned

_SLICE_S = 0.02  # how long a waiting thread may keep `cancel` of another one waiting
_MAX_IDLE = 8  # connections kept per peer
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH
_ENDS = (
    _REFUSED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
)


def chunks(spans: Sequence[SpanPair]) -> Iterator[list[SpanPair]]:
    """`spans` in order, cut and gathered into what one request may ask for."""
    return gather(cut(spans, CHUNK_BYTES), most_bytes=CHUNK_BYTES, most_spans=CHUNK_PIECES)


class Link:
    """A connection to an owner: requests and answers, not reads. Not thread-safe.

    It connects on its own, after the first `ask`. libzmq reconnects in silence; here a lost
    connection is an error, told by the socket's monitor, and every failure is for good.
    """

    def __init__(self, context: Context, address: ZmqAddress) -> None:
        self.peer = endpoint(address.host, address.port)
        self._header = memoryview(bytearray(MAX_HEADER_BYTES))
        self._number = 0
        self._poller = zmq.Poller()
        with ExitStack() as undo:
            try:
                self._socket = context.socket(zmq.DEALER)
                undo.callback(self._socket.close, 0)
                self._monitor = self._socket.get_monitor_socket(int(_ENDS))
                undo.callback(self._monitor.close, 0)
                self._connect(address)
            except zmq.ZMQError as error:
                raise TransportError(f"zmq cannot connect to {self.peer}: {error}") from error
            undo.pop_all()

    def _connect(self, address: ZmqAddress) -> None:
        self._socket.linger = 0
        self._socket.ipv6 = ":" in address.host
        self._socket.reconnect_ivl = -1
        self._socket.handshake_ivl = int(1000 * HANDSHAKE_S)
        self._socket.maxmsgsize = CHUNK_BYTES
        self._socket.plain_username = USER
        self._socket.plain_password = address.token.encode()
        self._socket.set_hwm(HIGH_WATER)
        for watched in (self._socket, self._monitor):
            self._poller.register(watched, zmq.POLLIN)
        self._socket.connect(self.peer)

    def ask(self, pieces: Sequence[SpanPair], region: int = 0) -> int:
        """Send one request, whose number is returned; at most `WINDOW` may be unanswered."""
        self._number += 1
        wanted = tuple((piece.remote, piece.length) for piece in pieces)
        request = msgspec.msgpack.encode(PieceRequest(self._number, wanted, region))
        try:
            # Or libzmq may call a queue full that has drained: it looks only now and then.
            self._socket.get(zmq.EVENTS)
            self._socket.send(request, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.check()
            raise TransportError(f"cannot ask {self.peer}: {error}") from error
        return self._number

    def take(self, number: int, pieces: Sequence[SpanPair], local: ArenaMemory) -> bool:
        """Copy the next answer, which must be to `number`, into `local`; False: not here yet."""
        try:
            size = self._socket.recv_into(self._header, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise TransportError(f"cannot hear {self.peer}: {error}") from error
        try:
            header = msgspec.msgpack.decode(bytes(self._header[:size]), type=learned(AnswerHeader))
        except msgspec.DecodeError as error:
            raise TransportError(f"{self.peer} sent no answer of this protocol: {error}") from error
        if header.refusal:
            raise TransportError(f"{self.peer} refused to be read: {header.refusal}")
        if header.number != number:
            raise TransportError(f"{self.peer} answered {header.number} instead of {number}")
        for piece in pieces:
            with local.writable(piece.local, piece.length) as target:
                # A message arrives whole: its next frame is here, or the message is too short.
                more = self._socket.rcvmore
                size = self._socket.recv_into(target, flags=zmq.NOBLOCK) if more else 0
                if size != piece.length:
                    raise TransportError(f"{self.peer} sent {size} B instead of {piece.length} B")
        if self._socket.rcvmore:
            raise TransportError(f"{self.peer} sent more pieces than the {len(pieces)} asked for")
        return True

    def pause(self, seconds: float) -> None:
        """Return when something has happened, or after `seconds`."""
        self._poller.poll(max(1, int(1000 * seconds)))

    def check(self) -> None:
        """Raises TransportError when the connection has ended."""
        if self._monitor.poll(0):
            event = zmq.Event(recv_monitor_message(self._monitor)["event"])
            reason = "closed the connection, or nobody listens there"
            if event & _REFUSED:
                reason = "refused our token: another incarnation listens there"
            raise TransportError(f"{self.peer} {reason}")

    def close(self) -> None:
        """Drop the connection, and all that is still on its way. Idempotent."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


@dataclass(slots=True)
class _Peer(RemoteMemory):
    """`reads` that are under way, each with a connection of its own, and `idle` connections.

    `lock` guards both. It is the last in the order of locks: a read takes it when it ends.
    """

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


class ZmqTransfer(PolledTransfer):
    """A read over a connection of its own, a window of requests at a time."""

    def __init__(
        self,
        source: _Peer,
        link: Link,
        spans: Sequence[SpanPair],
        *,
        local: ArenaMemory,
        region: int,
    ) -> None:
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
            if not self._asked:
                self.is_done = True
                self._source.retire(self, self._link)
            elif self._is_idle:
                self._link.check()
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
    _context: Context

    @classmethod
    def host_named_in(cls, address: bytes) -> str | None:
        return decode_address(address, ZmqAddress).host

    def _serve(self) -> ArenaOwner:
        owner = ArenaOwner(self._regions, self._host)
        self._context = owner.context
        return owner

    def _decode(self, peer: str, blob: bytes) -> _Peer:
        address = decode_address(blob, ZmqAddress)
        return _Peer(peer, blob, address.nbytes, address)

    def _start(self, remote: _Peer, spans: Sequence[SpanPair], region: int) -> Transfer:
        local = self._regions[region]
        with remote.lock:
            link = remote.take_link(self._context)
            transfer = ZmqTransfer(remote, link, spans, local=local, region=region)
            remote.reads.add(transfer)
        transfer.poll()  # asks
        return transfer

    def _drop(self, remote: _Peer, reason: str) -> None:
        with remote.lock:
            remote.is_dropped = True
            reads = list(remote.reads)
        for read in reads:  # without the lock, which a read takes when it ends
            read.end(reason)
        while remote.idle:
            remote.idle.pop().close()
