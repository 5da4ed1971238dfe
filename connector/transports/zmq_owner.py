"""The owner's side of zmq: a thread that serves regions, and the messages that it understands.

One request names pieces of one region; its answer is a header and one frame per piece. Whoever has
the token may ask, by whatever name. The engine has no part in it; large pieces leave from the arena
itself.
"""

import ipaddress
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Annotated

import msgspec
import zmq

from connector.transports.address import Natural, PortNumber, RegionNumber, RegionSizes
from connector.transports.base import check_pieces
from engine.arena import ArenaMemory
from engine.errors import TransportError

Context = zmq.Context[zmq.Socket[bytes]]

CHUNK_BYTES = 1 << 20
"""Most bytes that one request asks for."""
CHUNK_PIECES = 256
"""Most pieces that one request names."""
WINDOW = 8
"""Unanswered requests of one read: at most 8 MiB are on the way."""
HIGH_WATER = 2 * WINDOW + 2  # libzmq counts what was taken in steps of half the mark
MAX_REQUEST_BYTES = 8 * 1024
MAX_HEADER_BYTES = 1024
HANDSHAKE_S = 5.0
USER = b"tandem"
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks about new connections (ZeroMQ RFC 27)
_ZAP_FRAMES = 8  # version, id, domain, address, routing id, mechanism, user, password
_HEARTBEAT_MS = 5_000  # a reader that vanished without a word is forgotten after three of them

_Length = Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES)]


class ZmqAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="zmq"):
    """The socket of one incarnation of an owner; `token` opens its connections and no other's."""

    host: Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
    port: PortNumber
    nbytes: RegionSizes
    token: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]

    def __post_init__(self) -> None:
        host = ipaddress.ip_address(self.host)  # ValueError for a name
        if host.is_multicast or host.is_unspecified:
            raise ValueError(f"{host} is no single host")


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """`pieces`: offset in the owner's region and length, in bytes."""

    number: Natural
    pieces: Annotated[
        tuple[tuple[Natural, _Length], ...], msgspec.Meta(min_length=1, max_length=CHUNK_PIECES)
    ]
    region: RegionNumber = 0


class AnswerHeader(msgspec.Struct, frozen=True, array_like=True):
    """Stands before the pieces; with a `refusal` none follow."""

    number: Natural
    refusal: Annotated[str, msgspec.Meta(max_length=MAX_HEADER_BYTES // 4)] = ""


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's spelling of an IP address and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class ArenaOwner:
    """Serves from its thread until `close`. Raises TransportError if it cannot listen.

    A connection that does not begin with the token of this incarnation is closed before it has
    sent one request (PLAIN, ZeroMQ RFC 24; nothing is encrypted). A reader that takes no answers
    gets no more of them than `HIGH_WATER`: the rest is dropped.

    `context` is for this node's own readers too: `close` ends it, and waits for their sockets.
    """

    def __init__(self, regions: Sequence[ArenaMemory], host: str) -> None:
        self.context = Context()
        self._token = secrets.token_hex(32)
        self._regions = regions
        self._sizes = tuple(region.nbytes for region in regions)
        self._decoder = msgspec.msgpack.Decoder(PieceRequest)
        self._admission = self.context.socket(zmq.REP)
        self._readers = self.context.socket(zmq.ROUTER)
        try:
            self.address = self._listen(host)
        except (zmq.ZMQError, OSError, ValueError) as error:
            self._close_sockets()
            self.context.term()
            raise TransportError(f"zmq cannot listen on {host!r}: {error}") from error
        self._thread = threading.Thread(target=self._serve, name="kv-zmq-owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.context.term()  # ends the thread
        self._thread.join()

    def _listen(self, host: str) -> bytes:
        ip = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        self._admission.linger = 0
        self._admission.bind(_ZAP)
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
        return msgspec.msgpack.encode(ZmqAddress(ip, port, self._sizes, self._token))

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._admission, zmq.POLLIN)
        poller.register(self._readers, zmq.POLLIN)
        # One thread owns both sockets, which ZeroMQ does not let threads share.
        try:
            while True:
                for ready, _ in poller.poll():
                    self._admit() if ready is self._admission else self._answer()
        except zmq.ContextTerminated:
            pass  # this is how it ends
        finally:
            self._close_sockets()

    def _admit(self) -> None:
        """Tell libzmq whether a new connection has the token."""
        frames = self._admission.recv_multipart()
        token = self._token.encode()
        known = len(frames) == _ZAP_FRAMES and secrets.compare_digest(frames[-1], token)
        status = b"200" if known else b"400"
        self._admission.send_multipart([*frames[:2], status, b"", USER, b""])

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
        number = 0
        try:
            request = self._decoder.decode(encoded)
            number = request.number
            check_pieces(request.pieces, request.region, sizes=self._sizes, most=CHUNK_BYTES)
        except (msgspec.DecodeError, TransportError) as error:
            return [msgspec.msgpack.encode(AnswerHeader(number, f"not answered: {error}"[:200]))]
        memory = self._regions[request.region]
        header = msgspec.msgpack.encode(AnswerHeader(number))
        return [header, *(memory.read(start, size) for start, size in request.pieces)]

    def _close_sockets(self) -> None:
        self._admission.close(0)
        self._readers.close(0)
