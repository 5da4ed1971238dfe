"""Asynchronous client of one node, for the proxy: token streams, description, tokenizer.

Every call has a deadline and every failure is a leaf of the error tree.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

from grpc import ChannelConnectivity, StatusCode, aio, ssl_channel_credentials

from engine.errors import (
    AuthenticationError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeLostError,
    UnavailableError,
)
from engine.rpc import convert
from engine.rpc.channel import MAX_REQUEST_BYTES, OPTIONS, PROVE_TIMEOUT_S, no_proof
from engine.rpc.messages import NodeInfo
from engine.rpc.pb import node_pb2 as pb
from engine.rpc.pb.node_pb2_grpc import IdentityStub, KvControlStub, NodeStub
from engine.rpc.proof import NOT_NEEDED, CallerProof, Metadata, Proven
from engine.rpc.status import DETAIL_KEY, error_from_status
from engine.tls import ClientTls
from engine.types import GenerateOutput, GenerateRequest

END_OF_CALL_S: Final = 1.0
"""For the status after a last output; `close` cuts off a node that does not send it."""

OutputCall: TypeAlias = aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateOutput]
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
        self._running: set[OutputCall] = set()
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

        Raises what the node raised, `DeadlineExceededError`, or `UnavailableError` when the node is
        away or its stream ends early.
        """
        message = convert.request_to_pb(request)
        # The peer would refuse it, and the request's fault must not look like the peer's.
        if (size := message.ByteSize()) > MAX_REQUEST_BYTES:
            raise InvalidRequestError(
                f"the request has {size} bytes; {MAX_REQUEST_BYTES} are allowed"
            )
        begin = partial(self._begin, message, deadlines)
        call, output = await self._with_proof(begin, deadlines.first_output_s)
        try:
            while output.finish_reason is None:
                yield output
                output = await self._read(call, deadlines.next_output_s)
            # Nobody waits for the status, which comes within the call's deadline. But gRPC cancels
            # a call that is collected, and the node would count a cancelled request.
            self._ending.add(call)
            call.add_done_callback(self._ending.discard)
            yield output
        finally:
            if output.finish_reason is None:
                call.cancel()

    async def _begin(
        self, message: pb.GenerateRequest, deadlines: StreamDeadlines, proof: Metadata
    ) -> tuple[OutputCall, GenerateOutput]:
        call = self._node.Generate(message, timeout=deadlines.total_s, metadata=proof)
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        try:
            return call, await self._read(call, deadlines.first_output_s)
        except BaseException:
            call.cancel()
            raise

    def cut_off(self) -> None:
        """Ends every token stream now, for a node that hangs; readers get `NodeLostError`."""
        for call in list(self._running):
            call.cancel()

    async def _read(self, call: OutputCall, limit_s: float) -> GenerateOutput:
        with self._errors_of_peer():
            async with asyncio.timeout(limit_s):
                message = await call.read()
        if not isinstance(message, pb.GenerateOutput):
            raise UnavailableError(f"node {self.address} ended a stream without a last output")
        return convert.output_from_pb(message)

    async def describe(self, timeout_s: float) -> NodeInfo:
        reply = await self._call(self._node.Describe, pb.DescribeRequest(), timeout_s)
        return convert.from_pb(reply, NodeInfo)

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        """File name to content, as the node has them."""
        reply = await self._call(self._node.GetTokenizer, pb.GetTokenizerRequest(), timeout_s)
        return dict(reply.files)

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
            text = f"{error.details()} (node {self.address})"
            named = error_from_status(error.code(), text, error.trailing_metadata() or ())
            # A node that was lost with the request counts against the request; one that was never
            # reached does not.
            if error.code() is StatusCode.UNAVAILABLE and _was_sent(error):
                named = NodeLostError(str(named))
            raise named from error
        except asyncio.CancelledError as error:
            # gRPC also answers reads on a closed channel with CancelledError.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise NodeLostError(f"the stream of node {self.address} was cut off") from error


def _was_sent(error: aio.AioRpcError) -> bool:
    """False where the node refused the call, or gRPC says that it never had a connection."""
    if any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return not (error.details() or "").startswith("failed to connect to all addresses")
