"""Asynchronous client of one node, for the proxy: token streams, description, tokenizer.

Every call has a deadline and every failure is a leaf of the error tree. Knows nothing of other
nodes.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from grpc import aio

from engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    TandemError,
    UnavailableError,
)
from engine.rpc import convert
from engine.rpc.channel import OPTIONS, token_metadata
from engine.rpc.messages import NodeInfo
from engine.rpc.pb import node_pb2 as pb
from engine.rpc.pb.node_pb2_grpc import KvControlStub, NodeStub
from engine.rpc.server import MAX_REQUEST_BYTES
from engine.rpc.status import error_from_status
from engine.types import GenerateOutput, GenerateRequest

END_OF_CALL_S: Final = 1.0
"""For the status behind a last output; a node that does not send it is cut off."""

OutputCall: TypeAlias = aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateOutput]
_Reply = TypeVar("_Reply")


@dataclass(slots=True, frozen=True)
class StreamDeadlines:
    """Seconds that a token stream may take: in all, to its first output, and between outputs."""

    total_s: float = 600.0
    first_output_s: float = 120.0
    next_output_s: float = 60.0


class NodeClient:
    """One channel to one node. Owned by whoever made it, who must `close` it."""

    def __init__(self, address: str, *, token: str | None) -> None:
        self.address = address
        self._metadata = token_metadata(token)
        self._channel = aio.insecure_channel(address, options=OPTIONS)
        self._node = NodeStub(self._channel)  # type: ignore[no-untyped-call]
        self._control = KvControlStub(self._channel)  # type: ignore[no-untyped-call]
        self._ending: set[OutputCall] = set()

    async def close(self) -> None:
        """Cancels what still runs, unless it has answered; its readers get `UnavailableError`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_OF_CALL_S):
                for call in list(self._ending):
                    await call.code()
        await self._channel.close()

    async def generate(
        self, request: GenerateRequest, deadlines: StreamDeadlines
    ) -> AsyncGenerator[GenerateOutput]:
        """Outputs of `request`, the last with a `finish_reason`; `aclose` cancels it on the node.

        Behind the last output the call ends by itself, within its deadline: nobody has to wait for
        its status, and to drop it would look like a cancellation to the node. Raises what the node
        raised, `DeadlineExceededError`, or `UnavailableError` when the node is away or its stream
        ends early.
        """
        message = convert.request_to_pb(request)
        _check_size(message)
        call = self._node.Generate(message, timeout=deadlines.total_s, metadata=self._metadata)
        limit_s = deadlines.first_output_s
        has_answered = False
        try:
            while not has_answered:
                output = await self._read(call, limit_s)
                has_answered = output.finish_reason is not None
                if has_answered:
                    self._let_end(call)
                yield output
                limit_s = deadlines.next_output_s
        finally:
            if not has_answered:
                call.cancel()

    def _let_end(self, call: OutputCall) -> None:
        """Keeps `call`, which is cancelled when it is collected, until its status is here."""
        self._ending.add(call)
        call.add_done_callback(self._ending.discard)

    async def _read(self, call: OutputCall, limit_s: float) -> GenerateOutput:
        with self._errors_of_peer():
            async with asyncio.timeout(limit_s):
                message = await call.read()
        if not isinstance(message, pb.GenerateOutput):
            raise UnavailableError(f"node {self.address} ended a stream without a last output")
        return convert.output_from_pb(message)

    async def describe(self, timeout_s: float) -> NodeInfo:
        reply = await self._call(
            self._node.Describe(pb.DescribeRequest(), timeout=timeout_s, metadata=self._metadata)
        )
        return convert.node_info_from_pb(reply)

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        """File name to content, as the node has them."""
        reply = await self._call(
            self._node.GetTokenizer(
                pb.GetTokenizerRequest(), timeout=timeout_s, metadata=self._metadata
            )
        )
        return dict(reply.files)

    async def release(
        self, engine_id: str, request_id: str, *, reason: str, timeout_s: float
    ) -> bool:
        """Give up a finished prefill that nobody will pull; true when its lease was still alive."""
        message = pb.ReleaseRequest(engine_id=engine_id, request_id=request_id, reason=reason)
        reply = await self._call(
            self._control.Release(message, timeout=timeout_s, metadata=self._metadata)
        )
        return bool(reply.was_alive)

    async def _call(self, call: Awaitable[_Reply]) -> _Reply:
        with self._errors_of_peer():
            return await call

    @contextmanager
    def _errors_of_peer(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise DeadlineExceededError(f"node {self.address} sent nothing in time") from error
        except aio.AioRpcError as error:
            raise self._named(error) from error
        except asyncio.CancelledError as error:
            if _is_this_task_cancelled():
                raise
            raise UnavailableError(f"the channel to node {self.address} was closed") from error

    def _named(self, error: aio.AioRpcError) -> TandemError:
        text = f"{error.details()} (node {self.address})"
        return error_from_status(error.code(), text, error.trailing_metadata() or ())


def _check_size(message: pb.GenerateRequest) -> None:
    """What the peer would refuse anyway is the request's fault, not the peer's."""
    size = message.ByteSize()
    if size > MAX_REQUEST_BYTES:
        raise InvalidRequestError(f"the request has {size} bytes; {MAX_REQUEST_BYTES} are allowed")


def _is_this_task_cancelled() -> bool:
    """Also without a cancellation gRPC answers reads on a closed channel with CancelledError."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
