"""HTTP to one worker: bounded answers, streams of server-sent events, errors of the error tree.

send ──headers──▶ first event ──next──▶ ... ──▶ the block ends
│◀─ first_output_s ─▶│◀ next_output_s ▶│
│◀──────────────── total_s ─────────────────▶│      too late, or cut off: the connection is closed
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp
import msgspec

from engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NodeLostError,
    OverloadedError,
    RequestAbortedError,
    TandemError,
    UnavailableError,
)
from serving.rpc.client import Patience, StreamDeadlines
from serving.rpc.node_http import NodeUrl
from serving.tls import ClientTls

MAX_ANSWER_BYTES: Final = 64 * 2**20
"""Of one answer, which names a prompt's blocks and perhaps the log-probabilities of its tokens."""
MAX_PAGE_BYTES: Final = 4 * 2**20
"""Of what a worker says of itself, which is read between other requests' tokens."""
MAX_EVENT_BYTES: Final = 8 * 2**20
REFUSALS: Final = frozenset({400, 413, 422})
"""The request is wrong, whichever worker gets it."""


class _Said(msgspec.Struct):
    message: str = ""
    code: Any = None


class _Refusal(msgspec.Struct):
    """Errors as OpenAI's servers write them, SGLang's own `message`, and FastAPI's `detail`."""

    error: _Said | str | None = None
    message: str = ""
    detail: Any = None

    @property
    def text(self) -> str:
        if isinstance(self.error, _Said):
            return self.error.message
        return self.error or self.message or (str(self.detail) if self.detail else "")


_REFUSAL = msgspec.json.Decoder(_Refusal)


@dataclass(slots=True, eq=False)
class _Open:
    """One request under way: `reply` once its headers have come, and why it was ended by us.

    `began`: event-loop time.
    """

    began: float
    reply: aiohttp.ClientResponse | None = None
    sending: asyncio.Timeout | None = None
    error: TandemError | None = None

    def end(self, error: TandemError) -> None:
        """Whoever waits for it gets `error`."""
        self.error = self.error or error
        if self.reply is not None:
            self.reply.close()
        elif self.sending is not None:
            self.sending.reschedule(asyncio.get_running_loop().time())


class HttpWorker:
    """The HTTP port of one worker, until `close`. Follows no redirects.

    `api_key` is sent to it as a bearer token.
    """

    def __init__(self, url: NodeUrl, *, api_key: str | None, tls: ClientTls | None) -> None:
        self.url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._tls = tls if url.has_tls else None
        self._session: aiohttp.ClientSession | None = None
        self._open: set[_Open] = set()

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a GET, whatever the status."""
        limits = StreamDeadlines(timeout_s, timeout_s, timeout_s)
        async with self._asking("GET", path, limits) as (_, reply):
            return reply.status, await _body(reply, MAX_PAGE_BYTES)

    async def post(
        self, path: str, body: bytes, *, request_id: str, deadlines: StreamDeadlines
    ) -> bytes:
        """The body of a good answer; any other raises."""
        asking = self._asking("POST", path, deadlines, body=body, request_id=request_id)
        async with asking as (_, reply):
            content = await _body(reply)
            if reply.status != 200:
                raise error_of(reply.status, content, retry_after=_retry_after(reply))
            return content

    async def stream(
        self, path: str, body: bytes, *, request_id: str, deadlines: StreamDeadlines
    ) -> AsyncGenerator[list[bytes]]:
        """The data of server-sent events, as many at once as have come; ends with the stream.

        Raises `NodeLostError` for one that breaks off.
        """
        asking = self._asking("POST", path, deadlines, body=body, request_id=request_id)
        async with asking as (request, reply):
            if reply.status != 200:
                content = await _body(reply)
                raise error_of(reply.status, content, retry_after=_retry_after(reply))
            async with aclosing(self._events(request, reply, deadlines)) as events:
                async for data in events:
                    yield data

    def cut_off(self) -> None:
        """Ends all requests; their readers get `NodeLostError`."""
        for request in list(self._open):
            request.end(NodeLostError(f"the requests of worker {self.url.text} were cut off"))

    async def close(self) -> None:
        self.cut_off()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _events(
        self, request: _Open, reply: aiohttp.ClientResponse, deadlines: StreamDeadlines
    ) -> AsyncGenerator[list[bytes]]:
        late = DeadlineExceededError(f"worker {self.url.text} sent nothing in time")
        end = partial(request.end, late)
        first = asyncio.get_running_loop().call_at(request.began + deadlines.first_output_s, end)
        patience: Patience | nullcontext[None] = nullcontext()
        rest = b""
        try:
            while True:
                with patience:
                    chunk = await reply.content.readany()
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise RequestAbortedError(f"worker {self.url.text} sent an endless event")
                # Other lines are comments, names of events and the empty line after each.
                if not (data := [it[5:].strip() for it in lines if it.startswith(b"data:")]):
                    continue
                if isinstance(patience, nullcontext):
                    first.cancel()
                    patience = Patience(deadlines.next_output_s, end)
                yield data
        finally:
            first.cancel()
            if isinstance(patience, Patience):
                patience.close()

    @asynccontextmanager
    async def _asking(
        self,
        method: str,
        path: str,
        deadlines: StreamDeadlines,
        *,
        body: bytes | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[tuple[_Open, aiohttp.ClientResponse]]:
        """One request, until the block ends; errors of the connection become ours."""
        loop = asyncio.get_running_loop()
        request = _Open(loop.time())
        late = DeadlineExceededError(f"worker {self.url.text} did not answer in time")
        limit = loop.call_at(request.began + deadlines.total_s, request.end, late)
        self._open.add(request)
        headers = dict(self._headers)
        if request_id is not None:
            headers |= {"X-Request-Id": request_id, "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(min(deadlines.first_output_s, deadlines.total_s)) as sending:
                request.sending = sending
                reply = await self._connected().request(
                    method,
                    self.url.text + path,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    ssl=True if self._tls is None else self._tls.context,
                )
            request.reply = reply
            try:
                yield request, reply
            finally:
                # A connection whose answer was not read to its end is closed, which aborts it.
                reply.release() if reply.content.at_eof() else reply.close()
        except TimeoutError as error:
            raise request.error or late from error
        except aiohttp.ClientConnectorError as error:
            why = error.os_error.strerror or error.os_error
            raise UnavailableError(f"cannot connect to worker {self.url.text}: {why}") from error
        except (aiohttp.ClientError, OSError) as error:
            lost = NodeLostError(
                f"worker {self.url.text} was lost: {error or type(error).__name__}"
            )
            raise request.error or lost from error
        finally:
            limit.cancel()
            self._open.discard(request)

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Each request has a connection of its own. A server may close an idle one just as
                # a request comes, which looks like a worker that is lost; and what P has handed
                # over may be read once, so such a request could not be sent again.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                # Requests of many clients share the session: none gets the cookies of another.
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=2**20,
            )
        return self._session


def error_of(status: int, body: bytes, retry_after: int | None = None) -> TandemError:
    """The error for an answer other than 200, with the worker's own words.

    A wrong request is nobody else's fault. A full worker is not a broken one. A worker that fails
    may do so for reasons of its own, so another one is asked.
    """
    try:
        said = _REFUSAL.decode(body).text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = ""
    text = f"HTTP {status}" + (f": {said[:1000]}" if said else "")
    if status in REFUSALS:
        return InvalidRequestError(said or text)
    if status == 429:
        return OverloadedError(text, retry_after_s=retry_after or 1)
    if status in (408, 504):
        return DeadlineExceededError(text)
    if status == 500:
        return RequestAbortedError(text)
    return UnavailableError(text)


def _retry_after(reply: aiohttp.ClientResponse) -> int | None:
    value = reply.headers.get("Retry-After", "")
    return int(value) if value.isdecimal() and len(value) < 5 else None


async def _body(reply: aiohttp.ClientResponse, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    data = bytearray()
    while chunk := await reply.content.readany():
        data += chunk
        if len(data) > max_bytes:
            raise RequestAbortedError(f"the answer is longer than {max_bytes} bytes")
    return bytes(data)
