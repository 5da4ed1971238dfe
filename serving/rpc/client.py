"""Asynchronous client of one node, for the proxy: token streams, description, tokenizer.

Every call has a deadline and every failure is a leaf of the error tree.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

from grpc import ChannelConnectivity, StatusCode, aio, ssl_channel_credentials

from engine.errors import (
    AuthenticationError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeLostError,
    TandemError,
)
from engine.types import GenerateOutput, GenerateRequest
from serving.rpc import convert
from serving.rpc.attachment import Attachment, OutputStream
from serving.rpc.channel import MAX_REQUEST_BYTES, OPTIONS, PROVE_TIMEOUT_S, no_proof
from serving.rpc.messages import NodeInfo
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import IdentityStub, KvControlStub, NodeStub
from serving.rpc.proof import NOT_NEEDED, CallerProof, Metadata, Proven
from serving.rpc.status import DETAIL_KEY, error_from_status
from serving.tls import ClientTls


class Patience:
    """Calls `give_up`, once, if a `with` block of it lasts longer than `limit_s` seconds.

    A timer for each wait would cost as much as the wait's own work where every token waits. This
    one's timer looks, when it ends, since when the present wait lasts, and begins anew.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
"""What a message has beside the request itself."""

_Reply = TypeVar("_Reply")


@dataclass(slots=True, frozen=True)
class StreamDeadlines:
    """Seconds that a token stream may take: in all, to its first output, and between outputs."""

    total_s: float = 600.0
    first_output_s: float = 120.0
    next_output_s: float = 60.0


class NodeClient:
    """One channel to one node. Its owner must `close` it.

    With a token, every method first makes the server prove, once per connection, that it knows the
    token too, and raises `UnprovenPeerError` if it does not.
    """

    def __init__(self, address: str, *, token: str | None, tls: ClientTls | None = None) -> None:
        self.address = address
        self._token = token
        self._proven: Proven | None = None
        self._proving = asyncio.Lock()
        self._channel = (
            aio.insecure_channel(address, options=OPTIONS)
            if tls is None
            else aio.secure_channel(
                address, ssl_channel_credentials(tls.authorities), options=OPTIONS
            )
        )
        self._identity = IdentityStub(self._channel)  # type: ignore[no-untyped-call]
        self._node = NodeStub(self._channel)  # type: ignore[no-untyped-call]
        self._control = KvControlStub(self._channel)  # type: ignore[no-untyped-call]
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
        with self._errors_of_peer():
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self._attaching)

    async def _attach_anew(self) -> Attachment:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            self._attachment = await self._with_proof(self._attach, ATTACH_TIMEOUT_S)
            return self._attachment

    async def _attach(self, proof: Metadata) -> Attachment:
        call = self._node.Attach(metadata=proof)
        try:
            with self._errors_of_peer():
                await call.initial_metadata()  # the node's: it has let this call in
                if call.done():
                    await call.wait_for_connection()  # raises what has ended it
        except BaseException:
            call.cancel()
            raise
        return Attachment(call, self.address, self._named)

    async def describe(self, timeout_s: float) -> NodeInfo:
        reply = await self._call(self._node.Describe, pb.DescribeRequest(), timeout_s)
        return convert.from_pb(reply, NodeInfo)

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        """File name to content, as the node has them."""
        reply = await self._call(self._node.GetTokenizer, pb.GetTokenizerRequest(), timeout_s)
        return dict(reply.files)

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        """Empties its cache. Raises UnavailableError while requests use it, or as for `_call`."""
        message = pb.ResetPrefixCacheRequest()
        await self._call(self._node.ResetPrefixCache, message, timeout_s)

    async def release(
        self, engine_id: str, request_id: str, *, reason: str, timeout_s: float
    ) -> bool:
        """Gives up a finished prefill that nobody will pull; true when its lease was alive."""
        message = pb.ReleaseRequest(engine_id=engine_id, request_id=request_id, reason=reason)
        reply = await self._call(self._control.Release, message, timeout_s)
        return bool(reply.was_alive)

    async def _call(
        self, method: Callable[..., Awaitable[_Reply]], request: object, timeout_s: float
    ) -> _Reply:
        async def once(proof: Metadata) -> _Reply:
            with self._errors_of_peer():
                return await method(request, timeout=timeout_s, metadata=proof)

        return await self._with_proof(once, timeout_s)

    async def _with_proof(
        self, call: Callable[[Metadata], Awaitable[_Reply]], timeout_s: float
    ) -> _Reply:
        """The result of `call`, which gets a second try at a node that has restarted meanwhile."""
        proven = await self._proof(timeout_s)
        try:
            return await call(proven.metadata)
        except AuthenticationError:
            if self._token is None:
                raise
            # Another call may have proven the new process already: its proof is kept.
            self._proven = None if self._proven is proven else self._proven
        return await call((await self._proof(timeout_s)).metadata)

    async def _proof(self, timeout_s: float) -> Proven:
        """The proof for the present connection; another process may answer on a new one."""
        if self._token is None:
            return NOT_NEEDED
        with self._errors_of_peer():
            async with asyncio.timeout(min(timeout_s, PROVE_TIMEOUT_S)), self._proving:
                # A lost connection may come back to another process on the same port.
                if self._channel.get_state() is not ChannelConnectivity.READY:
                    self._proven = None
                if self._proven is None:
                    self._proven = await self._prove(CallerProof(self._token, self.address))
                return self._proven

    async def _prove(self, proof: CallerProof) -> Proven:
        try:
            reply = await self._identity.Prove(pb.ProveRequest(), metadata=proof.question)
        except aio.AioRpcError as error:
            raise no_proof(error.code(), error.details(), self.address) from error
        return proof.check(reply)

    @contextmanager
    def _errors_of_peer(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise DeadlineExceededError(f"node {self.address} sent nothing in time") from error
        except aio.AioRpcError as error:
            raise self._named(error) from error
        except (asyncio.CancelledError, aio.UsageError) as error:
            # gRPC's answers to reads of a channel that was closed, and to calls on it.
            if _is_cancelled():
                raise
            raise NodeLostError(f"the stream of node {self.address} was cut off") from error

    def _named(self, error: aio.AioRpcError) -> TandemError:
        text = f"{error.details()} (node {self.address})"
        named = error_from_status(error.code(), text, error.trailing_metadata() or ())
        # A node that was lost with the request counts against the request; one that was never
        # reached does not.
        # INTERNAL is gRPC's own word where a write met the end of the call.
        if error.code() in (StatusCode.UNAVAILABLE, StatusCode.INTERNAL) and _was_sent(error):
            return NodeLostError(str(named))
        return named


def _is_cancelled() -> bool:
    """True if somebody wants the present task to end."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _look_at_error(task: "asyncio.Task[Attachment]") -> None:
    """asyncio logs an error that nobody has looked at: all that waited may have left."""
    if not task.cancelled():
        task.exception()


def _was_sent(error: aio.AioRpcError) -> bool:
    """False where the node refused the call, or gRPC says that it never had a connection."""
    if any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return not (error.details() or "").startswith("failed to connect to all addresses")
