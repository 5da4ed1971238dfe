"""A node's gRPC server: bind, authenticate calls, turn exceptions into statuses, drain, close."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from engine.errors import AuthenticationError, ConfigError, InvalidRequestError, TandemError
from serving.rpc.address import join_host_port
from serving.rpc.channel import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from serving.rpc.proof import PROVE_METHOD, SAME_TOKEN, NodeProof
from serving.rpc.status import DETAIL_KEY, error_to_detail, status_code
from serving.tls import ServerTls

log = structlog.get_logger()

MAX_CONCURRENT_CALLS: Final = 4096
CANCEL_GRACE_S: Final = 1.0

_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    # Else two nodes on one port would share its connections instead of one failing to bind.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what grpc.keepalive_timeout_ms no longer sets
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

Context: TypeAlias = aio.ServicerContext[Any, Any]
# Quoted: only the type stubs make this class generic.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Method: TypeAlias = Callable[[Any, Context], Awaitable[Any]]


class RpcService(Protocol):
    """A service that registers itself.

    Streaming methods are coroutines that call `context.write`, never generators: a cancelled
    coroutine closes what it iterates at once, an abandoned generator when it is collected.
    """

    def register(self, server: aio.Server) -> None:
        """Called once, before the server starts."""

    def drain(self) -> None:
        """New calls are refused from now on; calls that only wait for more to do end."""


class CallBorder(aio.ServerInterceptor):
    """All calls pass here: callers prove themselves, and exceptions get a typed detail."""

    def __init__(self, token: str | None) -> None:
        self._proof = None if token is None else NodeProof(token)

    def listens_on(self, port: int) -> None:
        """Must be called before the first call arrives, since proofs name the port."""
        if self._proof is not None:
            self._proof.port = port

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MaybeHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        # The one call for strangers; every other call must carry a proof made for this process.
        if handler_call_details.method == PROVE_METHOD:
            return _unread(self._prove)
        metadata = handler_call_details.invocation_metadata
        if self._proof is not None and not self._proof.is_known(metadata):
            return _unread(_refuse)
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler, self._ends_reply)

    def _ends_reply(self, context: Context) -> None:
        if self._proof is not None:
            metadata = context.invocation_metadata() or ()
            context.set_trailing_metadata(self._proof.of_reply(metadata))

    async def _prove(self, request: object, context: Context) -> bytes:
        if self._proof is None:
            raise ConfigError("this node was given no cluster token")
        return self._proof.answer(context.invocation_metadata() or ()).SerializeToString()


async def _refuse(request: object, context: Context) -> None:
    raise AuthenticationError(f"this node answers members of its cluster only; {SAME_TOKEN}")


def _unread(method: Method) -> Handler:
    """A handler that never reads the caller's message, so that strangers cannot send large ones."""
    # gRPC holds no more than the stream's window of a message that no handler reads.
    return grpc.stream_unary_rpc_method_handler(_with_border(method))


def _guarded(handler: Handler, ends_reply: Callable[[Context], None]) -> Handler:
    if handler.response_streaming:
        method, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    else:
        method, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
    if method is None:
        raise ConfigError("only calls that stream both ways, or neither, are supported")
    read = handler.request_deserializer

    def read_or_error(data: bytes) -> Any:
        """The message, or in place of an unreadable one the error that `_with_border` raises."""
        try:
            return data if read is None else read(data)
        except DecodeError as error:
            return InvalidRequestError(f"the message cannot be read: {error}")

    return make(_with_border(method, ends_reply), read_or_error, handler.response_serializer)


def _with_border(method: Any, ends_reply: Callable[[Context], None] = lambda _: None) -> Method:
    async def call(request: Any, context: Context) -> Any:
        try:
            if isinstance(request, InvalidRequestError):
                raise request
            reply = await method(request, context)
            ends_reply(context)
            return reply
        except TandemError as error:
            await _abort(context, error)
        except aio.InternalError as error:
            # gRPC raises it from a write if the caller left and its cancellation is not here yet.
            log.info("a caller left during its answer", error=str(error))
            raise asyncio.CancelledError from error
        # Broad: gRPC itself would send the text of any other exception to the caller.
        except Exception:
            log.exception("call failed on an unexpected error")
            await _abort(context, TandemError("internal error of the node; its log has the cause"))

    return call


async def _abort(context: Context, error: TandemError) -> None:
    detail = ((DETAIL_KEY, error_to_detail(error).SerializeToString()),)
    await context.abort(status_code(error), str(error)[:1000], detail)


class RpcServer:
    """A started server. `port` is the bound one. Close it with `close`, or `drain` first."""

    def __init__(self, server: aio.Server, port: int, services: Sequence[RpcService]) -> None:
        self.port = port
        self._server = server
        self._services = services

    async def drain(self, deadline_s: float) -> None:
        """Refuses new calls, lets running ones end, and cancels the rest after `deadline_s`."""
        for service in self._services:
            service.drain()
        await self._server.stop(deadline_s)

    async def close(self) -> None:
        await self._server.stop(0)
        await self._server.wait_for_termination(CANCEL_GRACE_S)


async def start_server(
    services: Sequence[RpcService],
    host: str,
    port: int,
    *,
    token: str | None,
    tls: ServerTls | None = None,
) -> RpcServer:
    """Serves on `host:port` (0 picks a port); raises ConfigError when it cannot be bound.

    With `tls` callers need no certificate: they prove themselves with the token.
    """
    border = CallBorder(token)
    server = aio.server(
        interceptors=(border,), options=_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
    )
    for service in services:
        service.register(server)
    bound_port = _bind(server, join_host_port(host, port), tls)
    border.listens_on(bound_port)
    await server.start()
    return RpcServer(server, bound_port, services)


def _bind(server: aio.Server, address: str, tls: ServerTls | None) -> int:
    try:
        if tls is None:
            bound_port = server.add_insecure_port(address)
        else:
            credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)])
            bound_port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen for gRPC on {address}: is the port in use?") from error
    if bound_port == 0:
        raise ConfigError(f"cannot listen for gRPC on {address}")
    return bound_port
