"""One HTTP/1.1 connection: uvicorn's, with deadlines, bounds and JSON errors. Knows no app.

A connection waits for its client until a whole request has arrived. A client that keeps the server
waiting is cut off: at a deadline, or earlier when another connection needs the room.

    opened, headers        body    reply   idle, headers           body ..
    | header_timeout_s    |       |       | keep_alive_timeout_s  |
    | may be dropped              | safe  | may be dropped
"""

import asyncio
import select
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from serving.http.callers import tenant_of
from serving.http.errors import error_body

_FRAMING: Final = (b"content-length", b"transfer-encoding")


class RequestParser:
    """Tells `requests` what the bytes of a connection say; has the methods that uvicorn calls.

    head that offers an upgrade | body                | next head ..
    one parser                  | the next parser reads on, after a head of framing alone
    """

    def __init__(self, requests: HttpToolsProtocol) -> None:
        self._requests = requests
        self._framing: list[bytes] = []
        self._repeats_head = False
        self._parser = self._fresh()

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError for what is no request."""
        rest = memoryview(data)  # many offers in one packet must not copy the rest of it each
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                self._read_on()

    def should_upgrade(self) -> bool:
        """No: HTTP/1.1 is all that is served."""
        return False

    def should_keep_alive(self) -> bool:
        """Whether the request that is being read lets the connection stay."""
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        """Version of the request that is being read, as `1.1`."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """Method of the request that is being read."""
        return self._parser.get_method()

    def _fresh(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn does: a request is answered even if more follows its `Connection: close`.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _read_on(self) -> None:
        """Let a new parser read the body of the request whose head has just ended.

        It is told the framing in the client's own lines, so it refuses what the first one would.
        """
        version = self._parser.get_http_version().encode()
        lines = [b"POST / HTTP/" + version, *self._framing]
        if not self._parser.should_keep_alive():
            lines.append(b"connection: close")
        self._parser = self._fresh()
        self._repeats_head = True
        self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        if not self._repeats_head:
            self._framing.clear()
            self._requests.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._repeats_head:
            self._requests.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._repeats_head:
            return
        if name.lower() in _FRAMING:
            self._framing.append(name + b": " + value)
        self._requests.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            self._repeats_head = False
        else:
            self._requests.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._requests.on_body(body)

    def on_message_complete(self) -> None:
        # After an offer httptools calls the message complete, but its body is still to come.
        if not self._parser.should_upgrade():
            self._requests.on_message_complete()


# Bytes of framing that a byte of the body pays for: a body may come in chunks of a byte each.
OVERHEAD_PER_BODY_BYTE: Final = 16
# A client that sends no more may still read, or be gone. Seconds between two looks at the socket,
# and between the kernel's own probes, which a client that has gone stops to answer after 60 s.
HALF_CLOSED_LOOK_S: Final = 0.2
HALF_CLOSED_PROBE_S: Final = 5


@dataclass(slots=True, frozen=True)
class ConnectionLimits:
    """Seconds that the server waits for a client, and how much it takes from one.

    `header_timeout_s` begins with the connection, and with the first byte of each request;
    `linger_timeout_s` is for the rest of a refused body. A reply is not held up by a slow reader
    until `max_unread_bytes` of it wait here; who then does not read half of them within
    `send_timeout_s` is cut off. `max_unread_bytes_in_all` bounds what waits for all readers.
    `max_connections` None: as many as the descriptors of the process allow.
    """

    header_timeout_s: float = 15.0
    keep_alive_timeout_s: float = 120.0
    linger_timeout_s: float = 2.0
    send_timeout_s: float = 10.0
    max_unread_bytes: int = 4_194_304
    max_unread_bytes_in_all: int = 134_217_728
    max_header_bytes: int = 65_536
    max_connections: int | None = None


class Connections:
    """All connections of one server; those that wait for their clients in order of waiting."""

    def __init__(self, limit: int, state: ServerState) -> None:
        self.limit = limit
        self.num_dropped = 0
        self.opening: set[asyncio.Task[None]] = set()
        self._established = state.connections
        self._waiting: dict[object, Callable[[], object]] = {}

    def make_room(self) -> bool:
        """Drop the connection that waits longest if the server is full; False if none waits."""
        if len(self.opening) + len(self._established) < self.limit:
            return True
        # Full. Connections wait in order, so the first has waited longest.
        self.num_dropped += 1
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self._waiting.pop(longest)()
        return True

    def bound_unread(self, most: int) -> None:
        """Cuts off readers until no more than `most` bytes of replies wait for all of them.

        The tenant whose readers keep the most waiting loses its largest reply first.
        """
        unread = {it: it.num_unread for it in self._established if isinstance(it, Connection)}
        while sum(unread.values()) > most:
            by_tenant: Counter[str] = Counter()
            for connection, num_bytes in unread.items():
                by_tenant[connection.tenant] += num_bytes
            largest = by_tenant.most_common(1)[0][0]
            mine = [it for it in unread if it.tenant == largest]
            slowest = max(mine, key=lambda it: unread[it])
            del unread[slowest]
            slowest.transport.abort()

    def waits(self, who: object, drop: Callable[[], object]) -> None:
        """`who` waits for its client from now on, and `drop` ends it."""
        self._waiting.pop(who, None)
        self._waiting[who] = drop

    def settled(self, who: object) -> None:
        """`who` no longer waits for its client: it has a request, or is gone."""
        self._waiting.pop(who, None)


@dataclass(slots=True, frozen=True)
class ReplyTransport:
    """Where uvicorn writes a reply; `close` may wait, unlike the connection's own."""

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    close: Callable[[], None]


class Connection(HttpToolsProtocol):
    """Reads requests, hands them to the app and writes the replies."""

    def __init__(
        self,
        connections: Connections,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        *,
        state: ServerState,
    ) -> None:
        super().__init__(config, state, {})
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self.timeout_keep_alive = limits.keep_alive_timeout_s  # type: ignore[assignment]
        self._connections = connections
        self._limits = limits
        self._overhead = 0
        self._chunk = 0
        self._has_begun = False
        self._in_headers = True
        self._is_refused = False
        self._is_last = False
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self._limits.max_unread_bytes
        transport.set_write_buffer_limits(high=most, low=most // 2)
        self._replies = ReplyTransport(transport.write, transport.is_closing, self._end_reply)
        self._wait_for_client(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._unset_keepalive_if_required()
        self._connections.settled(self)
        super().connection_lost(exc)
        for timer in (self._send_timer, self._look_timer):
            if timer is not None:
                timer.cancel()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: true keeps the connection for a reply that is still owed.

        Both a client that waits for its reply and one that has gone look like this. Only an answer
        to something that is sent tells them apart: nothing is, or a reset.
        """
        is_within_body = self._has_begun and not self._in_headers
        if self.scheme == "https" or self._is_free or self._is_refused or is_within_body:
            return None
        self.cycle.keep_alive = False  # the last reply ends the connection
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, HALF_CLOSED_PROBE_S)
        # An interim reply may come before the reply (RFC 9110, 15.2), and a comment between the
        # events of a stream, the one chunked reply there is. HTTP/1.0 has neither.
        if not self.pipeline and self.cycle.scope["http_version"] == "1.1":
            if not self.cycle.response_started:
                self.cycle.waiting_for_100_continue = False
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif self.cycle.chunked_encoding and not self.cycle.response_complete:
                self.transport.write(b"3\r\n:\n\n\r\n")
        poller = select.poll()
        poller.register(sock.fileno(), 0)  # errors and resets alone
        self._look(poller)
        return True

    def _look(self, poller: select.poll) -> None:
        """Abort once the client has reset the connection: nobody reads, so no event loop tells."""
        if poller.poll(0):
            self.transport.abort()
        else:
            self._look_timer = self.loop.call_later(HALF_CLOSED_LOOK_S, self._look, poller)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing would wait for the reader as well; the app learns that its client is gone.
        self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        # All bytes count as framing until `on_body` takes off what the body pays for.
        self._overhead += len(data)
        self._chunk = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(400, "this is no valid HTTP/1.1 request")
            return
        if self._overhead > self._limits.max_header_bytes:
            self._refuse(431, f"the headers are larger than {self._limits.max_header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._overhead = self._chunk
        self._has_begun = True
        self._expect(self._limits.header_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else a trailer of a chunked body, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._expect(None)
        super().on_headers_complete()
        self.cycle.transport = self._replies  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._overhead = max(0, self._overhead - OVERHEAD_PER_BODY_BYTE * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._chunk = 0  # the next request counts what follows in it when more comes
        self._has_begun = False
        self._in_headers = True
        super().on_message_complete()
        if self._is_last:
            self.transport.close()
        elif self.cycle.response_complete:
            self._wait_for_client(self._limits.keep_alive_timeout_s)
        else:
            self._connections.settled(self)  # the server owes a reply now: it may not be dropped

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.response_complete:
            return  # the next request is there already
        if self.transport.is_closing():
            self._expect(self._limits.keep_alive_timeout_s)
        elif self._in_headers:
            self._wait_for_client(self._limits.keep_alive_timeout_s)
        else:
            # Closing now would reset the connection, and the reply might get lost with it.
            self._unset_keepalive_if_required()
            self._wait_for_client(self._limits.linger_timeout_s)

    def _end_reply(self) -> None:
        """Close after a whole reply once the whole request has arrived, else at once.

        Closing while a body arrives resets the connection, and the reply might get lost with it.
        """
        if not self.cycle.response_complete or self._in_headers:
            self.transport.close()
            return
        self._is_last = True  # `on_response_complete` starts the timer
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _wait_for_client(self, seconds: float) -> None:
        self._connections.waits(self, self.transport.abort)
        self._expect(seconds)

    def _expect(self, seconds: float | None) -> None:
        """Restart the connection's one timer; None stops it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            self.transport.abort()
        elif not self._is_free:
            return  # half of the next request must not end this one: the reply's end starts a timer
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._has_begun and self._in_headers and not self._is_refused:
            seconds = self._limits.header_timeout_s
            self._refuse(408, f"the headers did not arrive within {seconds:g} s")
        else:
            self.transport.close()

    @property
    def num_unread(self) -> int:
        """Bytes that the client has not taken yet, beyond those in the kernel's buffers."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    @property
    def tenant(self) -> str:
        """The tenant of the last request."""
        return "" if self.cycle is None else tenant_of(dict(self.cycle.scope))

    @property
    def _is_free(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.disconnected

    def _refuse(self, status: int, message: str) -> None:
        """Write a last reply with an error, or cut a reply that has begun.

        The connection stays open for a while and ignores what arrives: closing it now would reset
        it before the client has read the error.
        """
        if self._is_last or (not self._is_free and self.cycle.response_started):
            self.transport.abort()
            return
        body = error_body(status, message)
        head = b"content-type: application/json\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + length + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._is_refused = True
        if self.cycle is not None:
            # Wakes an app that waits for the rest of the body: it learns that the client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self._wait_for_client(self._limits.linger_timeout_s)
