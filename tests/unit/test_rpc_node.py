"""Token streams over real gRPC: order, cancellation, deadlines, loss, tokens, hostile peers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from engine.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
    UnprovenPeerError,
)
from engine.rpc import convert
from engine.rpc.client import NodeClient, StreamDeadlines
from engine.rpc.server import start_server
from engine.types import GenerateRequest, SamplingParams
from tests.node_double import ScriptedNode, running_nodes, tokens_of, until

PROMPT = (1, 2, 3)
REQUEST = GenerateRequest(
    request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=5)
)
RELAXED = StreamDeadlines()


@asynccontextmanager
async def connected(node: ScriptedNode, token: str | None = None) -> AsyncIterator[NodeClient]:
    async with running_nodes(node):
        client = NodeClient(f"127.0.0.1:{node.port}", token=token)
        try:
            yield client
        finally:
            await client.close()


async def tokens_from(client: NodeClient, deadlines: StreamDeadlines = RELAXED) -> list[int]:
    stream = client.generate(REQUEST, deadlines)
    return [token async for output in stream for token in output.token_ids]


async def until_cut(node: ScriptedNode) -> None:
    async def is_cut() -> bool:
        return node.num_open == 0 and node.num_cut == 1

    await until(is_cut)


async def test_outputs_arrive_in_order_and_the_request_unchanged() -> None:
    node = ScriptedNode("d")
    async with connected(node) as client:
        assert await tokens_from(client) == tokens_of(PROMPT, 5)
    assert node.requests == [REQUEST]
    assert (node.num_open, node.num_cut) == (0, 0)


async def test_closing_after_the_last_output_is_no_cancellation() -> None:
    node = ScriptedNode("p")
    async with connected(node) as client:
        for _ in range(20):
            async with aclosing(client.generate(REQUEST, RELAXED)) as outputs:
                while (await anext(outputs)).finish_reason is None:
                    pass
    assert node.num_cut == 0
    assert not client._ending


async def test_closing_early_reaches_the_generator() -> None:
    node = ScriptedNode("d", hang_at=2)
    async with connected(node) as client:
        outputs = client.generate(REQUEST, RELAXED)
        await anext(outputs)
        await node.hanging.wait()
        await outputs.aclose()
        await until_cut(node)


async def test_cancelling_the_reader_reaches_the_generator() -> None:
    node = ScriptedNode("d", hang_at=0)
    async with connected(node) as client:
        reader = asyncio.create_task(tokens_from(client))
        await node.hanging.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until_cut(node)


@pytest.mark.parametrize(
    ("hang_at", "deadlines"),
    [
        (0, StreamDeadlines(first_output_s=0.1)),
        (2, StreamDeadlines(next_output_s=0.1)),
        (2, StreamDeadlines(total_s=0.2)),
    ],
)
async def test_a_silent_node_is_given_up(hang_at: int, deadlines: StreamDeadlines) -> None:
    node = ScriptedNode("d", hang_at=hang_at)
    async with connected(node) as client:
        with pytest.raises(DeadlineExceededError):
            await tokens_from(client, deadlines)
        await until_cut(node)


async def test_a_lost_node_is_unavailable() -> None:
    node = ScriptedNode("d", hang_at=2)
    async with connected(node) as client:
        reader = asyncio.create_task(tokens_from(client))
        await node.hanging.wait()
        await node.close()
        with pytest.raises(UnavailableError):
            await reader


async def test_closing_the_channel_is_no_cancellation_of_the_reader() -> None:
    node = ScriptedNode("d", hang_at=2)
    async with connected(node) as client:
        reader = asyncio.create_task(tokens_from(client))
        await node.hanging.wait()
        await client.close()
        with pytest.raises(UnavailableError, match="cut off"):
            await reader


async def test_an_absent_node_is_unavailable_at_once() -> None:
    client = NodeClient("127.0.0.1:1", token=None)
    with pytest.raises(UnavailableError):
        await client.describe(5.0)
    await client.close()


async def test_description_and_tokenizer_arrive() -> None:
    node = ScriptedNode("d", files={"tokenizer.json": b"{}" * 3_000_000}, ready=False)
    async with connected(node) as client:
        assert await client.describe(5.0) == node.describe()
        assert await client.get_tokenizer(5.0) == node.files


async def test_drain_lets_running_streams_end_and_refuses_new_ones() -> None:
    node = ScriptedNode("d")
    async with connected(node) as client:
        outputs = client.generate(REQUEST, RELAXED)
        tokens = list((await anext(outputs)).token_ids)
        assert node.rpc is not None
        draining = asyncio.create_task(node.rpc.drain(5.0))
        tokens += [token async for output in outputs for token in output.token_ids]
        await draining
        assert tokens == tokens_of(PROMPT, 5)
        with pytest.raises(UnavailableError):
            await client.describe(1.0)


async def test_a_caller_without_a_token_is_refused() -> None:
    node = ScriptedNode("d", token="secret")
    async with connected(node, None) as client:
        with pytest.raises(AuthenticationError, match="TANDEM_CLUSTER_TOKEN"):
            await tokens_from(client)
        with pytest.raises(AuthenticationError, match="TANDEM_CLUSTER_TOKEN"):
            await client.describe(5.0)
    assert not node.requests


@pytest.mark.parametrize("token", ["other", None])
async def test_a_caller_with_another_token_than_the_node_sends_nothing(token: str | None) -> None:
    node = ScriptedNode("d", token=token)
    async with connected(node, "secret") as client:
        with pytest.raises(UnprovenPeerError, match=f"127.0.0.1:{node.port} .*TANDEM_CLUSTER_TOK"):
            await tokens_from(client)
        with pytest.raises(UnprovenPeerError):
            await client.describe(5.0)
    assert not node.requests


async def test_the_right_token_is_let_in() -> None:
    async with connected(ScriptedNode("d", token="secret"), "secret") as client:
        assert await tokens_from(client) == tokens_of(PROMPT, 5)


@pytest.mark.parametrize(
    "garbage",
    [b"\x80\x04\x95pickle", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 400],
)
async def test_garbage_on_the_port_harms_nobody(garbage: bytes) -> None:
    node = ScriptedNode("d")
    async with connected(node) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(garbage)
        async with asyncio.timeout(10):
            while await reader.read(65536):
                pass
        writer.close()
        assert await tokens_from(client) == tokens_of(PROMPT, 5)


async def test_a_message_beyond_the_bound_is_refused_before_the_service() -> None:
    node = ScriptedNode("d")
    huge = GenerateRequest(request_id="r", prompt_token_ids=(1,), cache_salt="x" * 2**25)
    async with connected(node) as client:
        with pytest.raises(InvalidRequestError, match="bytes"):
            await anext(client.generate(huge, RELAXED))
        data = convert.request_to_pb(huge).SerializeToString()
        async with aio.insecure_channel(client.address) as channel:
            call: Any = channel.unary_unary("/tandem.v1.Node/Generate")
            with pytest.raises(aio.AioRpcError, match="larger than max"):
                await call(data, timeout=5.0)
    assert not node.requests


async def test_a_taken_port_is_a_config_error() -> None:
    node = ScriptedNode("d")
    async with running_nodes(node):
        with pytest.raises(ConfigError, match=str(node.port)):
            await start_server([], "127.0.0.1", node.port, token=None)
