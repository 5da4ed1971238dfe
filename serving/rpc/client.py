"""Asynchronous client of one node, for the proxy: token streams, description, tokenizer.

Every call has a deadline and every failure is a leaf of the error tree.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, TypeVar

from engine.errors import DeadlineExceededError, InvalidRequestError
from engine.types import GenerateOutput, GenerateRequest
from serving.rpc import convert
from serving.rpc.attachment import Attachment, OutputStream
from serving.rpc.channel import MAX_REQUEST_BYTES, ProvingChannel
from serving.rpc.messages import NodeInfo
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import KvControlStub, NodeStub
from serving.rpc.proof import Proven
from serving.tls import ClientTls


class Patience:
    """Calls `give_up`, once, if a `with` block of it lasts longer than `limit_s` seconds.

    A timer for each wait would cost as much as the wait's own work where every token waits. One
    timer serves all: when it fires, it checks the age of the present wait and is set again.
    """

    __slots__ = ("_give_up", "_limit_s", "_loop", "_since", "_timer", "is_over")

    def __init__(self, limit_s: float, give_up: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False

    def __enter__(self) -> Self:
        self._since = self._loop.time()
        if self._timer is None and not self.is_over:
            self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._since = None

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return  # the next wait starts a timer
        left = self._since + self._limit_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.is_over = True
            self._give_up()


ATTACH_TIMEOUT_S: Final = 30.0
"""For all that wait for it; a request that may take less gives up sooner."""
COMMAND_BYTES: Final = 256
"""Bytes of a message beside the request itself."""

_Reply = TypeVar("_Reply")


@dataclass(slots=True, frozen=True)
class StreamDeadlines:
    """Seconds that a token stream may take: in all, to its first output, and between outputs."""

    total_s: float = 600.0
    first_output_s: float = 120.0
    next_output_s: float = 60.0


class NodeClient:
    """The calls of a proxy to the node at `address`, over one channel. Its owner `close`s it."""

    def __init__(self, address: str, *, token: str | None, tls: ClientTls | None = None) -> None:
        self.address = address
        self._channel = ProvingChannel(address, token=token, tls=tls)
        self._node = NodeStub(self._channel.grpc)  # type: ignore[no-untyped-call]
        self._control = KvControlStub(self._channel.grpc)  # type: ignore[no-untyped-call]
        self._attachment: Attachment | None = None
        self._attaching: asyncio.Task[Attachment] | None = None

    async def close(self) -> None:
        """Cuts off what still runs or waits; its readers get `UnavailableError`."""
        if self._attaching is not None:
            self._attaching.cancel()
            await asyncio.gather(self._attaching, return_exceptions=True)
        if self._attachment is not None:
            await self._attachment.close()
        await self._channel.close()

    async def generate(
        self, request: GenerateRequest, deadlines: StreamDeadlines, prompt: bytes | None = None
    ) -> AsyncGenerator[GenerateOutput]:
        """Outputs of `request`, the last with a `finish_reason`; `aclose` cancels it on the node.

        `prompt`: that of `convert.prompt_to_bytes`, if the caller has it. Raises what the node
        raised, `DeadlineExceededError`, or `UnavailableError` when the node is away or its stream
        ends early.
        """
        prompt = convert.prompt_to_bytes(request) if prompt is None else prompt
        message = convert.request_to_bytes(request, prompt)
        # The peer would refuse it, and the request's fault must not look like the peer's.
        if (size := len(message) + COMMAND_BYTES) > MAX_REQUEST_BYTES:
            raise InvalidRequestError(
                f"the request has {size} bytes; {MAX_REQUEST_BYTES} are allowed"
            )
        loop = asyncio.get_running_loop()
        began = loop.time()
        attachment = await self._attached(min(deadlines.first_output_s, deadlines.total_s))
        stream = attachment.start(message, request.origin.traceparent)
        give_up = partial(self._give_up, stream)
        limit = loop.call_at(began + deadlines.total_s, give_up)
        first = loop.call_at(began + deadlines.first_output_s, give_up)
        patience = Patience(deadlines.next_output_s, give_up)
        is_over = False
        try:
            output = await stream.get()
            first.cancel()
            while output.finish_reason is None:
                yield output
                with patience:
                    output = await stream.get()
            is_over = True
            yield output
        finally:
            for timer in (limit, first):
                timer.cancel()
            patience.close()
            attachment.leave(stream, is_over=is_over)

    def cut_off(self) -> None:
        """Ends every token stream now, for a node that hangs; readers get `NodeLostError`."""
        if self._attaching is not None:
            self._attaching.cancel()
        if self._attachment is not None:
            self._attachment.cut_off()

    def _give_up(self, stream: OutputStream) -> None:
        stream.put(DeadlineExceededError(f"node {self.address} sent nothing in time"))

    async def _attached(self, limit_s: float) -> Attachment:
        """The call that carries all requests; a new one where the former has ended."""
        if self._attachment is not None and not self._attachment.is_over:
            return self._attachment
        # One task for all that wait: each may leave, and `cut_off` ends the wait of all.
        if self._attaching is None or self._attaching.done():
            self._attaching = asyncio.create_task(self._attach_anew())
            self._attaching.add_done_callback(_look_at_error)
        with self._channel.errors_of_peer():
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self._attaching)

    async def _attach_anew(self) -> Attachment:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            self._attachment = await self._channel.with_proof(self._attach, ATTACH_TIMEOUT_S)
            return self._attachment

    async def _attach(self, proven: Proven) -> Attachment:
        call = self._node.Attach(metadata=proven.metadata)
        try:
            with self._channel.errors_of_peer():
                await call.initial_metadata()  # the node's: it has let this call in
                if call.done():
                    await call.wait_for_connection()  # raises what has ended it
        except BaseException:
            call.cancel()
            raise
        return Attachment(call, self.address, self._channel.named)

    async def describe(self, timeout_s: float) -> NodeInfo:
        reply = await self._channel.call(self._node.Describe, pb.DescribeRequest(), timeout_s)
        return convert.from_pb(reply, NodeInfo)

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        """File name to content, as the node has them."""
        reply = await self._channel.call(
            self._node.GetTokenizer, pb.GetTokenizerRequest(), timeout_s
        )
        return dict(reply.files)

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        """Empties its cache. Raises UnavailableError while requests use it."""
        message = pb.ResetPrefixCacheRequest()
        await self._channel.call(self._node.ResetPrefixCache, message, timeout_s)

    async def release(
        self, engine_id: str, request_id: str, *, reason: str, timeout_s: float
    ) -> bool:
        """Gives up a finished prefill that nobody will pull; true when its lease was alive."""
        message = pb.ReleaseRequest(engine_id=engine_id, request_id=request_id, reason=reason)
        reply = await self._channel.call(self._control.Release, message, timeout_s)
        return bool(reply.was_alive)


def _look_at_error(task: "asyncio.Task[Attachment]") -> None:
    """asyncio logs an error that nobody has looked at: all that waited may have left."""
    if not task.cancelled():
        task.exception()
