"""The parser of requests: httptools', but an offered upgrade changes nothing.

RFC 9110, 7.8: a server may ignore `Upgrade`, and answers as if it were not there. httptools stops
at the end of such a head instead, and takes the body for another protocol.
"""

from typing import Final, Protocol

import httptools

_FRAMING: Final = (b"content-length", b"transfer-encoding")


class Requests(Protocol):
    """Listener to the requests of one connection, in the order of their bytes."""

    def on_message_begin(self) -> None: ...

    def on_url(self, url: bytes) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class RequestParser:
    """Tells `requests` what the bytes of a connection say; has the methods that uvicorn calls.

    head that offers an upgrade | body                | next head ..
    one parser                  | the next parser reads on, after a head of framing alone
    """

    def __init__(self, requests: Requests) -> None:
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
