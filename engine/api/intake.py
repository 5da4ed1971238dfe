"""Request bodies: received within bounds and worked on in threads. Knows no endpoint and no JSON.

Large bodies are worked on one at a time: they cost memory and a core for seconds. Small ones have
threads of their own and never wait for a large one.
"""

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope

from engine.api.disconnect import run_while_connected
from engine.errors import DeadlineExceededError, OverloadedError, UnavailableError

SMALL_BYTES: Final = 65_536
SMALL_AT_ONCE: Final = 3  # with the large one fewer than asyncio's threads on the smallest machine
TRIM_BYTES: Final = 262_144

_T = TypeVar("_T")
_libc = ctypes.CDLL(None)


@dataclass(slots=True, frozen=True)
class IntakeLimits:
    """Seconds for a body to arrive, to wait for its thread, and to be worked on; and bytes.

    `max_bytes_under_way` bounds all bodies together, without the first 64 KiB of each.
    """

    body_timeout_s: float = 60.0
    wait_timeout_s: float = 30.0
    work_timeout_s: float = 60.0
    max_bytes_under_way: int = 134_217_728


class Intake:
    """Takes the bodies of all requests of one app."""

    def __init__(self, limits: IntakeLimits) -> None:
        self._limits = limits
        self._small = asyncio.Semaphore(SMALL_AT_ONCE)
        self._large = asyncio.Semaphore(1)
        self._under_way = 0

    async def take(
        self, scope: Scope, receive: Receive, work: Callable[[bytes], _T], *, max_bytes: int
    ) -> _T:
        """What `work` makes of the request's JSON body, on a thread.

        Raises what `work` raises, HTTPException 408, 413 or 415, OverloadedError, UnavailableError,
        DeadlineExceededError, and ClientDisconnect when the client leaves.
        """
        request = Request(scope, receive)
        _check_media_type(request)
        share = _Share(self)
        try:
            body = await self._receive(request, share, max_bytes)
            lane = self._small if len(body) <= SMALL_BYTES else self._large
            await run_while_connected(receive, self._enter(lane))
        except BaseException:
            share.give_back()
            raise
        # The thread goes on when the client leaves: its room is taken until it ends.
        working = asyncio.ensure_future(asyncio.to_thread(_work, work, body))
        working.add_done_callback(partial(_on_end, lane, share))
        del body
        return await run_while_connected(receive, self._finish(working))

    async def _receive(self, request: Request, share: "_Share", max_bytes: int) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await _collect(request, share, max_bytes)
        except TimeoutError as error:
            seconds = self._limits.body_timeout_s
            raise HTTPException(408, f"the body did not arrive within {seconds:g} s") from error

    async def _enter(self, lane: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self._limits.wait_timeout_s):
                await lane.acquire()
        except TimeoutError as error:
            raise UnavailableError(
                f"other long requests took {self._limits.wait_timeout_s:g} s: try again later",
                retry_after_s=5,
            ) from error

    async def _finish(self, working: "asyncio.Future[_T]") -> _T:
        try:
            async with asyncio.timeout(self._limits.work_timeout_s):
                return await asyncio.shield(working)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the request was not tokenized within {self._limits.work_timeout_s:g} s"
            ) from error

    def _reserve(self, num_bytes: int) -> None:
        if self._under_way + num_bytes > self._limits.max_bytes_under_way:
            raise OverloadedError(
                f"bodies of {self._under_way} bytes are under way, {num_bytes} more do not fit"
            )
        self._under_way += num_bytes


class _Share:
    """What one body takes of the bytes under way."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._size = 0
        self._reserved = 0

    def grow(self, num_bytes: int) -> int:
        """Size of the body so far; raises OverloadedError."""
        self._size += num_bytes
        more = max(0, self._size - SMALL_BYTES) - self._reserved
        self._intake._reserve(more)
        self._reserved += more
        return self._size

    def give_back(self) -> None:
        self._intake._reserve(-self._reserved)
        self._reserved = 0


async def _collect(request: Request, share: _Share, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    async for chunk in request.stream():
        if share.grow(len(chunk)) > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _work(work: Callable[[bytes], _T], body: bytes) -> _T:
    try:
        return work(body)
    finally:
        if len(body) > TRIM_BYTES:
            _libc.malloc_trim(0)  # else glibc keeps hundreds of times the text's own size


def _on_end(lane: asyncio.Semaphore, share: _Share, working: "asyncio.Future[_T]") -> None:
    lane.release()
    share.give_back()
    if not working.cancelled():
        working.exception()  # seen: nobody may be left to look at it


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, f"Content-Type {media_type[:80]!r}: send application/json")


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {max_bytes} bytes")
