"""Who does not know the cluster token learns nothing, passes for nobody and is not listened to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc import aio

from connector.pd.wire.control_client import ControlClient
from engine.errors import UnprovenPeerError
from engine.types import GenerateRequest
from serving.rpc.client import NodeClient, StreamDeadlines
from serving.rpc.pb import node_pb2 as pb
from tests.support.api.node_double import ScriptedNode, running_nodes, tokens_of

S = 5.0
READY = grpc.ChannelConnectivity.READY
TOKEN = "topsecret-token-42"
PROVE = "/tandem.v1.Identity/Prove"
DESCRIBE = "/tandem.v1.Node/Describe"
PROMPT = (1, 2, 3)
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=PROMPT)


class Impostor(grpc.GenericRpcHandler):
    """Answers every call, writes down what it was sent, and asks `accomplice` for its proofs."""

    def __init__(self, accomplice: int = 0) -> None:
        self.accomplice = accomplice
        self.heard: dict[str, list[tuple[str, str | bytes]]] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self.heard[details.method] = [(key, value) for key, value in details.invocation_metadata]
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: Any) -> bytes:
        if not self.accomplice:
            return b"\x0a\x20" + bytes(32) + b"\x12\x20" + bytes(32)
        return await call(self.accomplice, PROVE, context.invocation_metadata())


async def call(port: int, method: str, metadata: Any) -> bytes:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        made: Any = channel.unary_unary(method)
        return bytes(await made(b"", metadata=tuple(metadata), timeout=S))


@asynccontextmanager
async def impostor_at(port: int, impostor: Impostor) -> AsyncIterator[None]:
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((impostor,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@asynccontextmanager
async def clients_of(port: int) -> AsyncIterator[tuple[NodeClient, ControlClient]]:
    address = f"127.0.0.1:{port}"
    client = NodeClient(address, token=TOKEN)
    control = ControlClient(address, token=TOKEN, caller_engine_id="d", timeout_s=S)
    try:
        yield client, control
    finally:
        await client.close()
        await control.close()


async def tokens_from(client: NodeClient) -> list[int]:
    outputs = client.generate(REQUEST, StreamDeadlines())
    return [token async for output in outputs for token in output.token_ids]


async def until_it_answers(ask: Callable[[], Awaitable[object]]) -> object:
    """Reconnecting takes a moment."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await ask()
            except UnprovenPeerError:
                raise
            except Exception:
                await asyncio.sleep(0.05)


async def test_who_takes_over_a_dead_node_s_port_gets_nothing_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, other = ScriptedNode("p", token=TOKEN), ScriptedNode("q", token=TOKEN)
    async with running_nodes(node, other), clients_of(node.port) as (client, control):
        await client.describe(S)
        await control.handshake()
        await node.close()
        for impostor in (Impostor(), Impostor(accomplice=other.port)):
            async with impostor_at(node.port, impostor), clients_of(node.port) as (fresh, puller):
                for ask in (
                    lambda: client.describe(S),
                    lambda: tokens_from(client),
                    lambda: fresh.describe(S),
                    lambda puller=puller: puller.handshake(),
                ):
                    with pytest.raises(UnprovenPeerError, match=f"127.0.0.1:{node.port}"):
                        await until_it_answers(ask)
            assert set(impostor.heard) == {PROVE}
            assert TOKEN not in str(impostor.heard)
        impostor = Impostor()
        # The connection may also be lost after its state was looked at.
        monkeypatch.setattr(control._channel.grpc, "get_state", lambda: READY)
        async with impostor_at(node.port, impostor):
            with pytest.raises(UnprovenPeerError):
                await until_it_answers(control.handshake)
            assert "/tandem.v1.KvControl/Handshake" in impostor.heard  # but it is not believed


async def test_what_a_caller_sends_is_good_for_one_life_of_one_node() -> None:
    """An impostor that hears whole calls, as of a caller that had proven it all to the node."""
    node, other = ScriptedNode("p", token=TOKEN), ScriptedNode("q", token=TOKEN)
    async with running_nodes(node, other), clients_of(node.port) as (client, _):
        await client.describe(S)
        assert client._channel._proven is not None
        metadata = client._channel._proven.metadata
        assert pb.NodeInfo.FromString(await call(node.port, DESCRIBE, metadata)).ready
        port = node.port
        await node.close()
        await node.start(port)
        for place in (port, other.port):
            with pytest.raises(aio.AioRpcError) as caught:
                await call(place, DESCRIBE, metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_node_that_was_started_anew_is_proven_anew() -> None:
    node = ScriptedNode("p", token=TOKEN)
    async with running_nodes(node), clients_of(node.port) as (client, control):
        await client.describe(S)
        await control.handshake()
        port = node.port
        await node.close()
        await node.start(port)
        assert await until_it_answers(lambda: tokens_from(client)) == tokens_of(PROMPT, 16)
        handshake = await until_it_answers(control.handshake)
        assert handshake == node.handshake()
        assert await client.describe(S) == node.describe()


@pytest.mark.parametrize("method", [DESCRIBE, PROVE, "/tandem.v1.Node/Attach", "/no/such"])
async def test_a_stranger_s_message_is_not_taken_in(method: str) -> None:
    """Counted on the way, at a server that could take 32 MB."""
    node = ScriptedNode("d", token=TOKEN)
    size = 30 * 2**20
    async with running_nodes(node):
        passed = 0

        async def relay(down: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
            up, to = await asyncio.open_connection("127.0.0.1", node.port)

            async def answers() -> None:
                with suppress(OSError):  # the caller has left, as it may after a refusal
                    while data := await up.read(1 << 16):
                        back.write(data)

            answering = asyncio.create_task(answers())
            nonlocal passed
            while data := await down.read(1 << 16):
                passed += len(data)
                to.write(data)
                await to.drain()
            answering.cancel()
            to.close()
            back.close()

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            options = (("grpc.max_send_message_length", -1),)
            async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                made: Any = channel.unary_unary(method)
                with pytest.raises(aio.AioRpcError) as caught:
                    await made(bytes(size), timeout=S)
    expected = "INVALID_ARGUMENT" if method == PROVE else "UNAUTHENTICATED"
    assert caught.value.code().name == expected
    # gRPC lets a window's worth pass before the refusal: on a busy machine it has grown to 8 MiB.
    assert passed < size / 2, passed


async def test_garbage_is_the_caller_s_fault() -> None:
    node = ScriptedNode("d")
    async with running_nodes(node), aio.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        made: Any = channel.stream_stream("/tandem.v1.Node/Attach")(timeout=S)
        await made.write(b"\xff\xff\xff")
        with pytest.raises(aio.AioRpcError, match="cannot be read") as caught:
            await made.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
