"""All requests of this process to one node, over one call: the caller's side of `Attach`.

A message per step and node, however many streams are open, instead of one per token and stream.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from grpc import aio

from engine.errors import NodeLostError, TandemError, UnavailableError
from engine.types import GenerateOutput
from serving.rpc import convert
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.status import error_of

AttachCall: TypeAlias = aio.StreamStreamCall[pb.Command, pb.News]


class OutputStream:
    """The outputs of one request, for one reader; the request's tokens bound its length.

    Leaner than an `asyncio.Queue`, since each token passes here.
    """

    __slots__ = ("_arrived", "_waiter", "number", "was_sent")

    def __init__(self, number: int) -> None:
        self.number = number
        self.was_sent = False
        self._arrived: deque[GenerateOutput | TandemError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, what: GenerateOutput | TandemError) -> None:
        self._arrived.append(what)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> GenerateOutput:
        """The next output; raises the error that came in its place."""
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        what = self._arrived.popleft()
        if isinstance(what, TandemError):
            raise what
        return what


class Attachment:
    """One call that a node has let in. `close` it; `is_over` once it can carry nothing more.

    `error_of_call` names what gRPC says of the call's end. Two tasks own the call's two directions:
    gRPC ends a whole call where the task is cancelled that reads or writes it.
    """

    def __init__(
        self, call: AttachCall, node: str, error_of_call: Callable[[aio.AioRpcError], TandemError]
    ) -> None:
        self.is_over = False
        self._call = call
        self._node = node
        self._error_of_call = error_of_call
        self._numbers = itertools.count(1)
        self._streams: dict[int, OutputStream] = {}
        # By number, oldest first: a request that is still to be sent, or the order to abort it.
        self._commands: dict[int, pb.Command] = {}
        self._has_commands = asyncio.Event()
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._write())]

    def start(self, request: bytes, traceparent: str) -> OutputStream:
        """Sends a serialized request; `leave` its stream in the end."""
        number = next(self._numbers)
        stream = self._streams[number] = OutputStream(number)
        if self.is_over:
            stream.put(self._never_sent())
        else:
            self._send(pb.Command(number=number, request=request, traceparent=traceparent))
        return stream

    def leave(self, stream: OutputStream, *, is_over: bool) -> None:
        """Nobody reads `stream` any more; unless the request is over, the node aborts it."""
        del self._streams[stream.number]
        was_waiting = self._commands.pop(stream.number, None) is not None
        if not (is_over or self.is_over or was_waiting):
            self._send(pb.Command(number=stream.number))

    def cut_off(self) -> None:
        """Ends every stream now; readers get `NodeLostError`."""
        self._end(NodeLostError(f"the stream of node {self._node} was cut off"))

    async def close(self) -> None:
        """As `cut_off`, and nothing of it is left."""
        self.cut_off()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        error: TandemError = UnavailableError(f"node {self._node} ended the streams")
        try:
            while isinstance(news := await self._call.read(), pb.News):
                self._spread(news)
        except aio.AioRpcError as ended:
            error = self._error_of_call(ended)
        finally:
            self._end(error)

    def _spread(self, news: pb.News) -> None:
        for happened in news.happened:
            stream = self._streams.get(happened.number)
            if stream is not None:  # None: its reader left while this was on its way
                stream.put(_taken(happened))

    async def _write(self) -> None:
        try:
            while await self._has_commands.wait():
                self._has_commands.clear()
                while self._commands:
                    await self._call.write(self._take_command())
        except (aio.AioRpcError, asyncio.InvalidStateError, aio.InternalError):
            pass  # the call is over, and its reader says why
        finally:
            # Without a writer nothing can be asked and nothing aborted: the reader ends too.
            self._call.cancel()

    def _take_command(self) -> pb.Command:
        """The oldest one; it counts as sent."""
        number = next(iter(self._commands))
        if (stream := self._streams.get(number)) is not None:  # None: an order to abort
            stream.was_sent = True
        return self._commands.pop(number)

    def _end(self, error: TandemError) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._commands.clear()
        self._call.cancel()
        for stream in self._streams.values():
            stream.put(error if stream.was_sent else self._never_sent())
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _send(self, command: pb.Command) -> None:
        self._commands[command.number] = command
        self._has_commands.set()

    def _never_sent(self) -> TandemError:
        return UnavailableError(f"node {self._node} was lost before it got the request")


def _taken(happened: pb.Happened) -> GenerateOutput | TandemError:
    try:
        if happened.HasField("output"):
            return convert.output_from_pb(happened.output)
    except TandemError as error:
        return error
    return error_of(happened.error)
