"""One connection of a reader to the owner of an arena. Knows requests and answers, not reads.

libzmq reconnects in silence; here a lost connection is an error, told by the socket's monitor.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from connector.transports.base import SpanPair
from connector.transports.zmq_wire import (
    CHUNK_BYTES,
    HANDSHAKE_S,
    HIGH_WATER,
    MAX_HEADER_BYTES,
    USER,
    AnswerHeader,
    PieceRequest,
    ZmqAddress,
    endpoint,
)
from engine.arena import ArenaMemory
from engine.errors import TransportError

_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH
_ENDS = (
    _REFUSED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
)

Context = zmq.Context[zmq.Socket[bytes]]


class Link:
    """Connects on its own, after the first `ask`. Not thread-safe. Every failure is for good."""

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
        self._check_header(bytes(self._header[:size]), number)
        for piece in pieces:
            with local.writable(piece.local, piece.length) as target:
                self._take_piece(target)
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
            raise TransportError(f"{self.peer} {_explain(event)}")

    def close(self) -> None:
        """Drop the connection, and all that is still on its way. Idempotent."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

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

    def _check_header(self, encoded: bytes, number: int) -> None:
        try:
            header = msgspec.msgpack.decode(encoded, type=AnswerHeader)
        except msgspec.DecodeError as error:
            raise TransportError(f"{self.peer} sent no answer of this protocol: {error}") from error
        if header.refusal:
            raise TransportError(f"{self.peer} refused to be read: {header.refusal}")
        if header.number != number:
            raise TransportError(f"{self.peer} answered {header.number} instead of {number}")

    def _take_piece(self, target: "memoryview[int]") -> None:
        # A message arrives whole, so its next frame is here, or the message is too short.
        size = self._socket.recv_into(target, flags=zmq.NOBLOCK) if self._socket.rcvmore else 0
        if size != target.nbytes:
            raise TransportError(f"{self.peer} sent {size} B instead of {target.nbytes} B")


def _explain(event: zmq.Event) -> str:
    if event & _REFUSED:
        return "refused our token: another incarnation listens there"
    return "closed the connection, or nobody listens there"
