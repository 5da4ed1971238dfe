"""Request bodies: received within bounds, then worked on in threads. Knows no endpoint and no JSON.

Large bodies are worked on one at a time: they cost memory and a core for seconds. Small ones have
threads of their own and never wait for a large one. Tenants take turns at both, and none of them
may take more of the common memory than it leaves free.
"""

import asyncio
import ctypes
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from engine.turns import Turns
from serving.http.callers import tenant_of

ACCEPTED: Final = "gzip, deflate"
PIECE_BYTES: Final = 262_144
# What follows a member is copied at its end: short steps keep many tiny members cheap.
STEP_BYTES: Final = 4096
_GZIP_BITS: Final = 31
_ZLIB_BITS: Final = 15


class Unpacker:
    """One compressed body, as its bytes arrive: a stream of deflate, or members of gzip in a row.

    RFC 1952, 2.2, allows the members; programs that append to a file or work in parallel write
    them. Nothing may follow the last.
    """

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream: zlib._Decompress | None = None
        self._rest = b""

    def piece(self, data: bytes) -> bytes:
        """Up to `PIECE_BYTES` of what `data` adds; nothing when more must arrive first.

        Raises InvalidRequestError for what is no such stream, and for bytes behind its end.
        """
        data = self._rest + data
        at = 0
        unpacked = bytearray()
        # A length of 0 would mean no bound, so the loop ends before.
        while len(unpacked) < PIECE_BYTES:
            step = data[at : at + STEP_BYTES]
            stream = self._stream_for(step)
            if stream is None:
                break
            try:
                out = stream.decompress(step, PIECE_BYTES - len(unpacked))
            except zlib.error as error:
                raise InvalidRequestError(f"the {self._coding} body is damaged: {error}") from error
            unpacked += out
            at += len(step) - len(stream.unconsumed_tail or stream.unused_data)
            # Without input a stream may still hold output for which there was no room.
            if not step and not out:
                break
        self._rest = data[at:]
        return bytes(unpacked)

    def _stream_for(self, step: bytes) -> "zlib._Decompress | None":
        """The stream that `step` goes on with or begins; None while it is too short to tell."""
        if self._stream is not None and self._stream.eof and step:
            if self._coding != "gzip":
                raise InvalidRequestError(f"more bytes follow the end of the {self._coding} body")
            self._stream = None
        if self._stream is None and len(step) >= 2:
            # RFC 9110 means zlib's format by "deflate"; some clients send the bare stream.
            is_zlib = step[0] & 15 == zlib.DEFLATED and int.from_bytes(step[:2]) % 31 == 0
            bits = _ZLIB_BITS if is_zlib else -_ZLIB_BITS
            self._stream = zlib.decompressobj(_GZIP_BITS if self._coding == "gzip" else bits)
        return self._stream

    def finish(self) -> None:
        """Raises InvalidRequestError if the stream has not ended."""
        if self._stream is None or not self._stream.eof:
            raise InvalidRequestError(f"the {self._coding} body is cut off")


def unpacker_of(request: Request) -> Unpacker | None:
    """None for a plain body; raises HTTPException 415 for a coding that is not read here."""
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding in ("", "identity"):
        return None
    if coding in ("gzip", "x-gzip", "deflate"):
        return Unpacker(coding.removeprefix("x-"))
    raise HTTPException(
        415,
        f"Content-Encoding {coding[:80]!r} is not read here: send one of {ACCEPTED}, or none",
        {"Accept-Encoding": ACCEPTED},
    )


SMALL_BYTES: Final = 65_536
SMALL_AT_ONCE: Final = 3  # with the large one fewer than asyncio's threads on the smallest machine
# Compressed bytes that cost the event loop less than a millisecond, whatever they hold.
PACKED_BYTES: Final = 4096
TRIM_BYTES: Final = 262_144
CLEANUP_TIMEOUT_S: Final = 10.0

_T = TypeVar("_T")
_libc = ctypes.CDLL(None)


@dataclass(slots=True, frozen=True)
class BodyLimits:
    """Seconds for a body to arrive, to wait for its thread, and to be worked on; and bytes.

    `max_bytes_in_flight` bounds all bodies together, without the first 64 KiB of each.
    """

    body_timeout_s: float = 60.0
    wait_timeout_s: float = 30.0
    work_timeout_s: float = 60.0
    max_bytes_in_flight: int = 134_217_728


class RequestBodies:
    """The bodies of all requests of one app."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self._limits = limits or BodyLimits()
        # One of a tenant: threads share the interpreter, and each slows down all others' steps.
        self._small = Turns(SMALL_AT_ONCE, per_tenant=1)
        self._large = Turns(1)
        self._unpacking = Turns(1)
        self._bytes_in_flight: Counter[str] = Counter()

    async def process(
        self, scope: Scope, receive: Receive, work: Callable[[bytes], _T], *, max_bytes: int
    ) -> _T:
        """Result of `work` on the request's JSON body; `work` runs on a thread.

        A body may be compressed; all bounds are for its unpacked bytes. Raises what `work` raises,
        InvalidRequestError for one that cannot be unpacked, HTTPException 408, 413 or 415,
        OverloadedError, UnavailableError, DeadlineExceededError, and ClientDisconnect when the
        client leaves.
        """
        request = Request(scope, receive)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise HTTPException(415, f"Content-Type {media_type[:80]!r}: send application/json")
        body = await self._receive(request, max_bytes)
        size, tenant = len(body), tenant_of(scope)
        threads = self._small if size <= SMALL_BYTES else self._large
        try:
            if not threads.take_now(tenant):
                await run_while_connected(receive, self._wait_for(threads, tenant))
        except BaseException:
            self._resize(tenant, size, 0)
            raise

        def on_end(working: asyncio.Future[_T]) -> None:
            threads.give_back(tenant)
            self._resize(tenant, size, 0)
            if not working.cancelled():
                working.exception()  # asyncio logs an exception that nobody has looked at

        # The thread goes on when the client leaves, and keeps its place until it ends.
        working = asyncio.ensure_future(asyncio.to_thread(_work, work, body))
        working.add_done_callback(on_end)
        del body  # the thread's reference is the last: its memory goes when the work ends
        return await run_while_connected(receive, self._finish(working))

    async def _receive(self, request: Request, max_bytes: int) -> bytes:
        # Refused by its length before a byte is read; a chunked body is counted as it comes.
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await self._collect(request, max_bytes)
        except TimeoutError as error:
            seconds = self._limits.body_timeout_s
            raise HTTPException(408, f"the body did not arrive within {seconds:g} s") from error

    async def _collect(self, request: Request, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        size, tenant = 0, tenant_of(request.scope)
        try:
            async for chunk in self._unpacked(request, max_bytes):
                self._resize(tenant, size, size + len(chunk))
                size += len(chunk)
                if size > max_bytes:
                    packed = "content-encoding" in request.headers
                    raise _too_large(max_bytes, " when unpacked" if packed else "")
                chunks.append(chunk)
            return b"".join(chunks)
        except BaseException:
            self._resize(tenant, size, 0)
            raise

    async def _unpacked(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """The body in pieces, none longer than what arrives at once or `PIECE_BYTES`."""
        unpacker = unpacker_of(request)
        arrived = unpacked = 0
        async for chunk in request.stream():
            if unpacker is None:
                yield chunk
                continue
            # A stream that unpacks to nothing must end too.
            arrived += len(chunk)
            if arrived > max_bytes:
                raise _too_large(max_bytes)
            while True:
                is_small = arrived <= PACKED_BYTES and unpacked <= SMALL_BYTES
                piece = (
                    unpacker.piece(chunk)
                    if is_small
                    else await self._unpack(unpacker, chunk, tenant_of(request.scope))
                )
                if not piece:
                    break
                unpacked += len(piece)
                yield piece
                chunk = b""
        if unpacker is not None:
            unpacker.finish()

    async def _unpack(self, unpacker: Unpacker, chunk: bytes, tenant: str) -> bytes:
        # One thread for all: the event loop goes on, and so do the threads that work on bodies.
        async with self._unpacking.turn(tenant, self._limits.body_timeout_s):
            return await asyncio.to_thread(unpacker.piece, chunk)

    def _resize(self, tenant: str, old: int, new: int) -> None:
        """Count a body that grows or goes; raises OverloadedError and leaves the count as it is."""
        # Small bodies are free, or a full budget would refuse short prompts too.
        more = max(0, new - SMALL_BYTES) - max(0, old - SMALL_BYTES)
        counts = self._bytes_in_flight
        free = self._limits.max_bytes_in_flight - counts.total() - more
        # One tenant alone gets half of it, two get a third each: whoever comes finds room.
        least = counts[tenant] + more if tenant else 0
        if more > 0 and free < least:
            raise OverloadedError(
                f"bodies of {counts[tenant]} bytes are under way, {more} more do not fit"
            )
        counts[tenant] += more
        if not counts[tenant]:
            del counts[tenant]

    async def _wait_for(self, threads: Turns, tenant: str) -> None:
        try:
            await threads.take(tenant, self._limits.wait_timeout_s)
        except TimeoutError as error:
            raise UnavailableError(
                f"other long requests took {self._limits.wait_timeout_s:g} s: try again later",
                retry_after_s=5,
            ) from error

    async def _finish(self, working: "asyncio.Future[_T]") -> _T:
        try:
            async with asyncio.timeout(self._limits.work_timeout_s):
                # A thread cannot be stopped: past the deadline it goes on, and keeps its place.
                return await asyncio.shield(working)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the request was not tokenized within {self._limits.work_timeout_s:g} s"
            ) from error


def _too_large(max_bytes: int, how: str = "") -> HTTPException:
    return HTTPException(413, f"the body is larger than {max_bytes} bytes{how}")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Result of `work`; when the client disconnects, cancels it and raises ClientDisconnect.

    The request's body must have been read. Cancelled work has `CLEANUP_TIMEOUT_S` to clean up.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching}, timeout=CLEANUP_TIMEOUT_S)


def _work(work: Callable[[bytes], _T], body: bytes) -> _T:
    try:
        return work(body)
    finally:
        if len(body) > TRIM_BYTES:
            _libc.malloc_trim(0)  # else glibc keeps hundreds of times the text's own size
