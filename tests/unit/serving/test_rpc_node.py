"""Token streams over real gRPC: order, cancellation, deadlines, loss, tokens, hostile peers."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from engine.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeLostError,
    TandemError,
    UnavailableError,
    UnprovenPeerError,
)
from engine.types import GenerateOutput, GenerateRequest, SamplingParams
from serving.rpc import convert
from serving.rpc.caller_requests import CallerRequests
from serving.rpc.channel import ProvingChannel
from serving.rpc.client import NodeClient, StreamDeadlines
from serving.rpc.node_service import NodeService
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import NodeStub
from serving.rpc.server import start_server
from serving.rpc.status import DETAIL_KEY, error_to_detail
from tests.support.api.node_double import ScriptedNode, running_nodes, tokens_of, until

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


async def until_open(node: ScriptedNode, count: int) -> None:
    async def are_open() -> bool:
        return node.num_open == count

    await until(are_open)


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


async def test_many_requests_share_a_call_and_end_each_by_itself() -> None:
    """One leaves, one cannot be read, one fails; all others get their tokens in few messages."""
    node = ScriptedNode("d", hang_at=1)
    async with connected(node) as client:
        streams = [client.generate(REQUEST, RELAXED) for _ in range(40)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        attachment = client._attachment
        assert attachment is not None and node.num_open == 40
        await streams.pop().aclose()
        await until_open(node, 39)
        node.hang_at, node.error = None, InvalidRequestError("refused")
        with pytest.raises(InvalidRequestError, match="refused"):
            await tokens_from(client)
        garbage = attachment.start(b"\xff\xff", "")
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            await garbage.get()
        attachment.leave(garbage, is_over=True)
        node.error = None
        node.go_on.set()
        assert await tokens_from(client) == tokens_of(PROMPT, 5)
        for stream in streams:
            tokens = [token async for output in stream for token in output.token_ids]
            assert tokens == tokens_of(PROMPT, 5)[1:]
        assert client._attachment is attachment and not attachment._streams
    assert (node.num_open, node.num_cut) == (0, 1)


async def test_requests_that_are_aborted_before_their_first_step_leave_nothing() -> None:
    source = ScriptedNode("d")
    requests = CallerRequests(source)
    message = convert.request_to_bytes(REQUEST, convert.prompt_to_bytes(REQUEST))
    for number in range(3):
        requests.take(pb.Command(number=number, request=message))
        requests.take(pb.Command(number=number))
    await asyncio.sleep(0.05)
    assert not requests._tasks and not source.num_open


async def test_a_caller_that_stood_still_gets_all_in_bounded_messages_before_the_end() -> None:
    requests = CallerRequests(ScriptedNode("d"))
    message = convert.request_to_bytes(REQUEST, convert.prompt_to_bytes(REQUEST))
    for number in range(200):
        requests.take(pb.Command(number=number, request=message))
    await requests.end()  # 5 outputs of each wait to be sent
    sent: list[pb.News] = []

    async def send(news: pb.News) -> None:
        sent.append(news)

    await requests.write(send)
    assert [len(news.happened) for news in sent] == [256, 256, 256, 232]
    tokens: dict[int, list[int]] = {}
    for happened in (happened for news in sent for happened in news.happened):
        tokens.setdefault(happened.number, []).extend(happened.output.token_ids)
    assert tokens == dict.fromkeys(range(200), tokens_of(PROMPT, 5))


async def test_nothing_is_kept_of_requests_that_leave_before_they_are_sent() -> None:
    node = ScriptedNode("d")
    async with connected(node) as client:
        assert await tokens_from(client) == tokens_of(PROMPT, 5)
        attachment = client._attachment
        assert attachment is not None
        message = convert.request_to_bytes(REQUEST, convert.prompt_to_bytes(REQUEST))
        for _ in range(3):  # the node gets none of them, nor is it told to abort one
            attachment.leave(attachment.start(message, ""), is_over=False)
        assert not attachment._commands
        assert await tokens_from(client) == tokens_of(PROMPT, 5)
        assert len(node.requests) == 2
        attachment.start(message, "")
        attachment.cut_off()
        assert not attachment._commands


async def test_nothing_is_lost_between_an_attachment_s_end_and_a_request() -> None:
    node = ScriptedNode("d")
    async with connected(node) as client:
        assert await tokens_from(client) == tokens_of(PROMPT, 5)
        attachment = client._attachment
        assert attachment is not None
        attachment.cut_off()
        late = attachment.start(b"", "")
        with pytest.raises(UnavailableError, match="before it got the request"):
            await late.get()
        attachment.leave(late, is_over=False)
        assert await tokens_from(client) == tokens_of(PROMPT, 5)


@pytest.mark.parametrize("token", [None, "secret"])
async def test_requests_that_wait_for_a_connection_keep_their_deadline_and_end_with_their_client(
    token: str | None,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        client = NodeClient(f"127.0.0.1:{silent.getsockname()[1]}", token=token)
        soon = StreamDeadlines(total_s=0.2, first_output_s=60.0)
        with pytest.raises(DeadlineExceededError):
            async with asyncio.timeout(5):
                await tokens_from(client, soon)
        for end in (client.cut_off, client.close):
            waiting = [asyncio.create_task(tokens_from(client)) for _ in range(3)]
            await asyncio.sleep(0.1)
            waiting[0].cancel()  # the others wait on
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in waiting[1:])
            if (closing := end()) is not None:
                await closing
            async with asyncio.timeout(5):
                ended = await asyncio.gather(*waiting[1:], return_exceptions=True)
            assert all(isinstance(error, UnavailableError) for error in ended), ended


async def test_a_restarted_node_gets_a_call_of_its_own() -> None:
    node = ScriptedNode("d")
    async with connected(node) as client:
        assert await tokens_from(client) == tokens_of(PROMPT, 5)
        port, attachment = node.port, client._attachment
        assert attachment is not None
        await node.close()

        async def is_over() -> bool:
            return attachment.is_over

        await until(is_over)  # a request that comes sooner is lost with the node
        await node.start(port)
        for _ in range(3):
            assert await tokens_from(client) == tokens_of(PROMPT, 5)


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
        data = convert.request_to_bytes(huge, convert.prompt_to_bytes(huge))
        async with aio.insecure_channel(client.address) as channel:
            call: Any = NodeStub(channel).Attach(timeout=5.0)  # type: ignore[no-untyped-call]
            await call.write(pb.Command(number=1, request=data))
            with pytest.raises(aio.AioRpcError, match="larger than max"):
                await call.read()
    assert not node.requests


async def test_a_taken_port_is_a_config_error() -> None:
    node = ScriptedNode("d")
    async with running_nodes(node):
        with pytest.raises(ConfigError, match=str(node.port)):
            await start_server([], "127.0.0.1", node.port, token=None)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_call_that_the_node_s_end_cut_counts_as_a_lost_node(code: grpc.StatusCode) -> None:
    """INTERNAL is gRPC's word where a write met the end; a node's own errors carry a detail."""
    channel = ProvingChannel("127.0.0.1:1", token=None)
    detail = ((DETAIL_KEY, error_to_detail(TandemError("bug")).SerializeToString()),)
    for metadata, is_lost in (((), True), (detail, False)):
        error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*metadata), "cut")
        assert isinstance(channel.named(error), NodeLostError) is is_lost
    await channel.close()


class LateSource:
    """Writes once more although its call was cancelled."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        try:
            yield GenerateOutput(token_ids=(1,))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                yield GenerateOutput(token_ids=(2,))
        finally:
            self.closed.set()


@pytest.mark.filterwarnings("error")
async def test_a_late_write_to_a_cancelled_call_ends_it_quietly() -> None:
    """A caller that leaves is no fault of the node, whatever gRPC makes of the write."""
    source = LateSource()
    service = NodeService(source, ScriptedNode("d").describe, {})
    server = await start_server([service], "127.0.0.1", 0, token=None)
    client = NodeClient(f"127.0.0.1:{server.port}", token=None)
    with capture_logs() as logs:
        stream = client.generate(REQUEST, RELAXED)
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(10):
            await source.closed.wait()
        await client.close()
        await server.close()
    assert not logs
