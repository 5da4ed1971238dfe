"""A client of ZMTP 3.0, ZeroMQ's protocol, that bounds what one message may take.

libzmq bounds the frames of a message and the messages that wait, but not how many frames a message
has: one without end fills the memory before anybody sees it. So only chunks of bytes come from
libzmq here, in a STREAM socket, and messages are made of them by `MessageReader`.

    greeting (64 bytes) │ READY │ frame │ frame │ ...       a frame: flags, length, body
"""

from contextlib import suppress
from typing import Literal

import zmq

from engine.errors import ConfigError, KVEventError

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Kind = Literal["SUB", "DEALER"]

MAX_FRAMES = 16
"""Of one message; a publisher sends three or four."""
MAX_CHUNKS = 64
"""Of 8 KiB, that libzmq keeps for us; what comes then waits with the publisher, or is dropped."""
_GREETING = b"\xff" + (1).to_bytes(8, "big") + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_HEAD_BYTES = 9  # flags and the longest form of a length
_MAX_PING_CONTEXT = 16
_KEEP_ALIVE_S = 5  # a publisher that vanished without a word is noticed after three of them
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 2_000


def encoded(*frames: bytes) -> bytes:
    """A message as it travels."""
    last = len(frames) - 1
    return b"".join(_frame(_MORE if n < last else 0, each) for n, each in enumerate(frames))


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def _command(name: bytes, body: bytes) -> bytes:
    return _frame(_COMMAND, bytes([len(name)]) + name + body)


def _ready(kind: Kind) -> bytes:
    properties = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", kind.encode()), (b"Identity", b""))
    )
    return _command(b"READY", properties)


class MessageReader:
    """Makes messages of the bytes of one connection; knows no sockets.

    It keeps no more than one message and one chunk. `answers`: bytes that the peer waits for.
    """

    def __init__(self, first: bytes, max_bytes: int) -> None:
        """`first`: an answer to READY. `max_bytes`: of one message, all frames together."""
        self.answers = b""
        self._first = first
        self._max_bytes = max_bytes
        self._has_greeted = False
        self._bytes = bytearray()

    def feed(self, chunk: bytes) -> None:
        """More bytes have come; `next` is called until it has no more before the next ones."""
        self._bytes += chunk

    def next(self) -> list[bytes] | None:
        """The next whole message; None until more bytes come.

        Raises KVEventError for a peer that breaks the protocol or a bound.
        """
        if not self._has_greeted and not self._take_greeting():
            return None
        while self._bytes and self._bytes[0] & _COMMAND:
            end = self._end_of_frame(0)
            if end > len(self._bytes):
                return None
            self._obey(bytes(self._bytes[_body_at(self._bytes[0]) : end]))
            del self._bytes[:end]
        return self._take_message()

    def _take_greeting(self) -> bool:
        told = self._bytes[: len(_GREETING)]
        if len(told) < len(_GREETING):
            return False
        is_known = (told[0], told[9], bytes(told[12:32])) == (0xFF, 0x7F, _GREETING[12:32])
        if not is_known or told[10] < 3:
            raise KVEventError("the peer does not speak ZMTP 3 without encryption")
        del self._bytes[: len(_GREETING)]
        self._has_greeted = True
        return True

    def _take_message(self) -> list[bytes] | None:
        frames: list[tuple[int, int]] = []
        place, num_bytes, more = 0, 0, True
        while more:
            if len(frames) == MAX_FRAMES:
                raise KVEventError(f"a message has more than {MAX_FRAMES} frames")
            end = self._end_of_frame(place, num_bytes)
            if end > len(self._bytes):
                return None
            flags = self._bytes[place]
            if flags & _COMMAND:
                raise KVEventError("a command stands inside a message")
            frames.append((place + _body_at(flags), end))
            num_bytes += end - frames[-1][0]
            place, more = end, bool(flags & _MORE)
        message = [bytes(self._bytes[start:end]) for start, end in frames]
        del self._bytes[:place]
        return message

    def _end_of_frame(self, place: int, taken: int = 0) -> int:
        """Where the frame at `place` ends, perhaps after what has come. `taken`: bytes before it.

        Raises KVEventError as soon as its length is known to be too much.
        """
        head = self._bytes[place : place + _HEAD_BYTES]
        start = _body_at(head[0]) if head else _HEAD_BYTES
        if len(head) < start:
            return place + _HEAD_BYTES
        length = int.from_bytes(head[1:start], "big")
        if taken + length > self._max_bytes:
            raise KVEventError(f"a message of more than {self._max_bytes} bytes")
        return place + start + length

    def _obey(self, command: bytes) -> None:
        end = 1 + int.from_bytes(command[:1], "big")
        name, body = command[1:end], command[end:]
        if name == b"ERROR":
            raise KVEventError(f"the peer refuses the connection: {body[1:200]!r}")
        if name == b"READY":
            self.answers += self._first
            self._first = b""
        if name == b"PING":  # two bytes of time to live, then what the answer repeats
            self.answers += _command(b"PONG", body[2 : 2 + _MAX_PING_CONTEXT])


def _body_at(flags: int) -> int:
    """The bytes before a frame's body."""
    return _HEAD_BYTES if flags & _LONG else 2


class Channel:
    """One connection to a publisher, which is never made a second time once it was there.

    `socket`: to be polled for input by the one thread that all methods belong to. None of them
    waits. Its owner closes it.
    """

    def __init__(
        self, context: Context, endpoint: str, *, kind: Kind, first: bytes, max_bytes: int
    ) -> None:
        """`first`: a message, encoded, that goes out when the peer is ready for it.

        Raises ConfigError for an address that ZeroMQ does not know.
        """
        self._opening = _GREETING + _ready(kind)
        self._reader = MessageReader(first, max_bytes)
        self._is_there = False
        self.is_over = False
        self.socket: Socket = context.socket(zmq.STREAM)
        self.socket.linger = 0
        self.socket.rcvhwm = MAX_CHUNKS
        self.socket.ipv6 = "[" in endpoint
        self.socket.tcp_keepalive = 1
        self.socket.tcp_keepalive_idle = self.socket.tcp_keepalive_intvl = _KEEP_ALIVE_S
        self.socket.tcp_keepalive_cnt = 3
        # While nobody listens; once it was there, a connection that ends is told.
        self.socket.reconnect_ivl = _RECONNECT_MS
        self.socket.reconnect_ivl_max = _MAX_RECONNECT_MS
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ConfigError(f"cannot subscribe to {endpoint}: {error}") from error

    def next(self) -> list[bytes] | None:
        """As `MessageReader.next`, of the bytes that were received; sends the answers."""
        message = self._reader.next()
        if self._reader.answers:
            answers, self._reader.answers = self._reader.answers, b""
            self._send(answers)
        return message

    def receive(self) -> bool:
        """Take in one chunk; False: none has come. `is_over` is set when the peer has left."""
        try:
            self._peer, chunk = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if chunk:
            self._reader.feed(chunk)
        elif not self._is_there:  # libzmq tells by empty chunks that a peer comes, and that it goes
            self._is_there = True
            self._send(self._opening)
        else:
            self.is_over = True
        return True

    def close(self) -> None:
        """Drop the connection, and what is on its way. Idempotent."""
        self.socket.close(0)

    def _send(self, data: bytes) -> None:
        # A peer that takes nothing gets no answer to its pings; one that has left is told soon.
        with suppress(zmq.ZMQError):
            self.socket.send_multipart([self._peer, data], zmq.NOBLOCK)
