"""A channel to one server of the cluster, which has to prove that it knows the token.

Bounds of messages, keepalive and quick reconnects are the same for all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import grpc
from grpc import aio

from engine.errors import AuthenticationError, DeadlineExceededError, NodeLostError, TandemError
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import IdentityStub
from serving.rpc.proof import NOT_NEEDED, CallerProof, Proven, unproven
from serving.rpc.status import DETAIL_KEY, error_from_status
from serving.tls import ClientTls

MAX_REQUEST_BYTES: Final = 32 * 2**20
MAX_REPLY_BYTES: Final = 64 * 2**20

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what grpc.keepalive_timeout_ms no longer sets
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in fact the time that a connection may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Else channels of this process with equal options would share one connection.
    ("grpc.use_local_subchannel_pool", 1),
    # `http_proxy` of the environment is for the internet, not for the nodes of a cluster.
    ("grpc.enable_http_proxy", 0),
)
PROVE_TIMEOUT_S: Final = 5.0
"""At most; a call that may take less gives its proof less."""

_OF_THE_LINK: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)


_Result = TypeVar("_Result")


class ProvingChannel:
    """One channel to the server at `address`, on the event loop that opens it. `close` it.

    With a token, every call first makes the server prove, once per connection, that it knows the
    token too, and raises `UnprovenPeerError` if it does not. Every call has a deadline, and every
    failure is a leaf of the error tree: `UnavailableError` when the server is away,
    `DeadlineExceededError` when it is late, and otherwise what it raised.
    """

    def __init__(self, address: str, *, token: str | None, tls: ClientTls | None = None) -> None:
        self.address = address
        self._token = token
        self._proven: Proven | None = None
        self._proving = asyncio.Lock()
        self.grpc = (
            aio.insecure_channel(address, options=OPTIONS)
            if tls is None
            else aio.secure_channel(
                address, grpc.ssl_channel_credentials(tls.authorities), options=OPTIONS
            )
        )
        self._identity = IdentityStub(self.grpc)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Cuts off what still runs or waits."""
        await self.grpc.close()

    async def call(self, method: Callable[..., Any], request: object, timeout_s: float) -> Any:
        """The reply of a `method` that neither takes nor sends a stream."""

        async def once(proven: Proven) -> Any:
            with self.errors_of_peer():
                made = method(request, timeout=timeout_s, metadata=proven.metadata)
                try:
                    reply, trailing = await made, await made.trailing_metadata()
                finally:
                    made.cancel()
            # gRPC connects again by itself, perhaps to another process, and does not say so.
            if self._token is not None and not proven.is_reply(trailing or ()):
                self._forget(proven)
                raise unproven(self.address, "another process has its port")
            return reply

        return await self.with_proof(once, timeout_s)

    async def with_proof(
        self, call: Callable[[Proven], Awaitable[_Result]], timeout_s: float
    ) -> _Result:
        """The result of `call`, which gets a second try at a node that has restarted meanwhile."""
        proven = await self._proof(timeout_s)
        try:
            return await call(proven)
        except AuthenticationError:
            if self._token is None:
                raise
            self._forget(proven)
        # If another process answers now, it says so itself (`engine_id`).
        return await call(await self._proof(timeout_s))

    @contextmanager
    def errors_of_peer(self) -> Iterator[None]:
        """Raises failures of calls as leaves of the error tree."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineExceededError(f"node {self.address} sent nothing in time") from error
        except aio.AioRpcError as error:
            raise self.named(error) from error
        except (asyncio.CancelledError, aio.UsageError) as error:
            # gRPC's answers to reads of a channel that was closed, and to calls on it; unless
            # somebody wants the present task to end.
            task = asyncio.current_task()
            if task is None or task.cancelling() > 0:
                raise
            raise NodeLostError(f"the stream of node {self.address} was cut off") from error

    def named(self, error: aio.AioRpcError) -> TandemError:
        """The leaf of the error tree for a failed call."""
        text = f"{error.details()} (node {self.address})"
        named = error_from_status(error.code(), text, error.trailing_metadata() or ())
        # A node that was lost with the request counts against the request; one that was never
        # reached does not.
        # INTERNAL is gRPC's own word where a write met the end of the call.
        lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
        return NodeLostError(str(named)) if lost and _was_sent(error) else named

    def _forget(self, proven: Proven) -> None:
        # Another call may have proven the new process already: its proof is kept.
        self._proven = None if self._proven is proven else self._proven

    async def _proof(self, timeout_s: float) -> Proven:
        """The proof for the present connection; another process may answer on a new one."""
        if self._token is None:
            return NOT_NEEDED
        with self.errors_of_peer():
            async with asyncio.timeout(min(timeout_s, PROVE_TIMEOUT_S)), self._proving:
                # A lost connection may come back to another process on the same port.
                if self.grpc.get_state() is not grpc.ChannelConnectivity.READY:
                    self._proven = None
                if self._proven is None:
                    self._proven = await self._prove(CallerProof(self._token, self.address))
                return self._proven

    async def _prove(self, proof: CallerProof) -> Proven:
        try:
            reply = await self._identity.Prove(pb.ProveRequest(), metadata=proof.question)
        except aio.AioRpcError as error:
            if error.code() in _OF_THE_LINK:
                raise
            cause = f"{error.code().name}: {error.details()}"
            raise unproven(self.address, cause) from error
        return proof.check(reply)


def _was_sent(error: aio.AioRpcError) -> bool:
    """False where the node refused the call, or gRPC says that it never had a connection."""
    if any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return not (error.details() or "").startswith("failed to connect to all addresses")
