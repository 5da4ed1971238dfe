"""The requests that one caller has open on this node: the node's side of `Attach`.

    commands ──▶ a task per request: source.generate ──▶ what has happened ──▶ one message of it all

A step gives outputs to many requests at once. Each task appends its own; the writer wakes after the
last of them, since the event loop runs tasks in the order in which they were woken.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import structlog
from google.protobuf.message import DecodeError
from msgspec import structs

from engine.errors import InvalidRequestError, OverloadedError, TandemError, UnavailableError
from engine.types import GenerateRequest, RequestOrigin
from serving.generator import TokenSource
from serving.rpc import convert
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.status import error_to_detail

MAX_OPEN: Final = 4096
MAX_HAPPENED: Final = 256
"""Of one message: one over `MAX_REPLY_BYTES`, after a caller stood still, would end them all."""

log = structlog.get_logger()


class CallerRequests:
    """Starts and aborts requests by the caller's numbers; `close` aborts those that are left."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._happened: list[pb.Happened] = []
        self._has_news = asyncio.Event()
        self._refuses_new = False
        self._is_over = False

    async def take_all(self, commands: AsyncIterator[pb.Command | InvalidRequestError]) -> None:
        """Takes commands until the caller ends them; raises what stands for an unreadable one."""
        async for command in commands:
            if isinstance(command, InvalidRequestError):
                raise command
            self.take(command)

    def take(self, command: pb.Command) -> None:
        """Starts a request, or aborts one; an unknown one has ended meanwhile."""
        number, task = command.number, self._tasks.get(command.number)
        if not command.request:
            if task is not None:
                task.cancel()
        elif task is not None:
            self._tell(number, InvalidRequestError(f"the request number {number} is taken"))
        elif self._refuses_new:
            self._tell(number, UnavailableError("the node is shutting down"))
        elif len(self._tasks) >= MAX_OPEN:
            self._tell(number, OverloadedError(f"{MAX_OPEN} requests of this caller are open"))
        else:
            task = self._tasks[number] = asyncio.create_task(self._run(command))
            # Not in the task itself: one that is aborted before its first step runs no line.
            task.add_done_callback(lambda _: self._tasks.pop(number))

    async def end(self) -> None:
        """Refuses new requests; when those under way have ended, `write` returns after the last."""
        self._refuses_new = True
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._is_over = True
        self._has_news.set()

    async def write(self, send: Callable[[pb.News], Awaitable[None]]) -> None:
        """Sends what happens, to the last of it."""
        # The last may have come while the one before it was being sent.
        while self._happened or not self._is_over:
            await self._has_news.wait()
            self._has_news.clear()
            happened, self._happened = self._happened, []
            for it in filter(_is_large, happened):
                await send(pb.News(happened=[it]))
            small = [it for it in happened if not _is_large(it)]
            for start in range(0, len(small), MAX_HAPPENED):
                await send(pb.News(happened=small[start : start + MAX_HAPPENED]))

    async def close(self) -> None:
        """Aborts the requests that are left, and waits until their streams are closed."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, command: pb.Command) -> None:
        number = command.number
        try:
            async with aclosing(self._source.generate(_request_of(command))) as outputs:
                async for output in outputs:
                    self._add(pb.Happened(number=number, output=convert.output_to_pb(output)))
        except TandemError as error:
            self._tell(number, error)
        # Broad: a fault of one request must not end those of all others.
        except Exception:
            log.exception("a request failed on an unexpected error")
            self._tell(number, TandemError("internal error of the node; its log has the cause"))

    def _tell(self, number: int, error: TandemError) -> None:
        self._add(pb.Happened(number=number, error=error_to_detail(error)))

    def _add(self, happened: pb.Happened) -> None:
        self._happened.append(happened)
        self._has_news.set()


def _is_large(happened: pb.Happened) -> bool:
    """Log-probabilities of a prompt are megabytes, so they travel alone: messages are bounded.

    They come with a request's first output, so nothing of it is overtaken.
    """
    return happened.output.HasField("prompt_logprobs")


def _request_of(command: pb.Command) -> GenerateRequest:
    try:
        message = pb.GenerateRequest.FromString(command.request)
    except DecodeError as error:
        raise InvalidRequestError(f"the request cannot be read: {error}") from error
    request = convert.request_from_pb(message)
    if not command.traceparent:
        return request
    return structs.replace(request, origin=RequestOrigin(traceparent=command.traceparent))
