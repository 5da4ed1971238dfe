"""The owner's side of zmq: a thread that serves regions to everybody who was told its token.

Knows no readers by name. The engine has no part in it; large pieces leave from the arena itself.
"""

import secrets
import socket
import threading
from collections.abc import Sequence

import msgspec
import zmq

from connector.transports.zmq_wire import (
    CHUNK_BYTES,
    HANDSHAKE_S,
    HIGH_WATER,
    MAX_REQUEST_BYTES,
    USER,
    AnswerHeader,
    PieceRequest,
    ZmqAddress,
    endpoint,
)
from engine.arena import ArenaMemory
from engine.errors import TransportError

_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks about new connections (ZeroMQ RFC 27)
_ZAP_FRAMES = 8  # version, id, domain, address, routing id, mechanism, user, password
_HEARTBEAT_MS = 5_000  # a reader that vanished without a word is forgotten after three of them


class ArenaOwner:
    """Serves from `context` until that is terminated. Raises TransportError if it cannot listen.

    A connection that does not begin with the token of this incarnation is closed before it has
    sent one request (PLAIN, ZeroMQ RFC 24; nothing is encrypted). A reader that takes no answers
    gets no more of them than `HIGH_WATER`: the rest is dropped.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        regions: Sequence[ArenaMemory],
        host: str,
    ) -> None:
        self._token = secrets.token_hex(32)
        self._regions = regions
        self._decoder = msgspec.msgpack.Decoder(PieceRequest)
        self._door = context.socket(zmq.REP)
        self._readers = context.socket(zmq.ROUTER)
        try:
            self.address = self._listen(host)
        except (zmq.ZMQError, OSError) as error:
            self._close_sockets()
            raise TransportError(f"zmq cannot listen on {host!r}: {error}") from error
        self._thread = threading.Thread(target=self._serve, name="kv-zmq-owner", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread, which ends when the context is terminated."""
        self._thread.join()

    def _listen(self, host: str) -> ZmqAddress:
        ip = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        self._door.linger = 0
        self._door.bind(_ZAP)
        readers = self._readers
        readers.linger = 0
        readers.ipv6 = ":" in ip
        readers.plain_server = True
        readers.zap_domain = USER
        readers.handshake_ivl = int(1000 * HANDSHAKE_S)
        readers.heartbeat_ivl = _HEARTBEAT_MS
        readers.heartbeat_timeout = 3 * _HEARTBEAT_MS
        readers.maxmsgsize = MAX_REQUEST_BYTES
        readers.set_hwm(HIGH_WATER)
        readers.router_mandatory = True  # without it, a full queue would be no error
        readers.bind(endpoint(ip, "*"))
        port = int(readers.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return ZmqAddress(ip, port, tuple(it.nbytes for it in self._regions), self._token)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._door, zmq.POLLIN)
        poller.register(self._readers, zmq.POLLIN)
        # One thread owns both sockets, which ZeroMQ does not let threads share.
        try:
            while True:
                for ready, _ in poller.poll():
                    self._admit() if ready is self._door else self._answer()
        except zmq.ContextTerminated:
            pass  # this is how it ends
        finally:
            self._close_sockets()

    def _admit(self) -> None:
        """Tell libzmq whether a new connection has the token."""
        frames = self._door.recv_multipart()
        known = len(frames) == _ZAP_FRAMES and secrets.compare_digest(
            frames[-1], self._token.encode()
        )
        status = b"200" if known else b"400"
        self._door.send_multipart([*frames[:2], status, b"", USER, b""])

    def _answer(self) -> None:
        reader, request, *rest = self._readers.recv_multipart()
        answer = self._find(request if not rest else b"")
        try:
            self._readers.send_multipart([reader, *answer], zmq.NOBLOCK, copy=False)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:
            pass  # the reader left, or asks and asks and takes nothing: both are its own loss

    def _find(self, encoded: bytes) -> "list[bytes | memoryview[int]]":
        """Header and pieces, or a header that refuses: no offset leads out of a region."""
        try:
            request = self._decoder.decode(encoded)
        except msgspec.DecodeError as error:
            return [_refusal(0, f"not a request: {error}")]
        if sum(length for _, length in request.pieces) > CHUNK_BYTES:
            return [_refusal(request.number, f"more than {CHUNK_BYTES} B in one request")]
        if request.region >= len(self._regions):
            return [_refusal(request.number, f"there is no region {request.region}")]
        memory = self._regions[request.region]
        for offset, length in request.pieces:
            if offset + length > memory.nbytes:
                text = f"{length} B at {offset} end past the arena ({memory.nbytes} B)"
                return [_refusal(request.number, text)]
        header = msgspec.msgpack.encode(AnswerHeader(request.number))
        return [header, *(memory.read(start, size) for start, size in request.pieces)]

    def _close_sockets(self) -> None:
        self._door.close(0)
        self._readers.close(0)


def _refusal(number: int, text: str) -> bytes:
    return msgspec.msgpack.encode(AnswerHeader(number, text[:200]))
