"""A caller that leaves is no fault of the node, whatever gRPC makes of the write that was late."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from structlog.testing import capture_logs

from engine.errors import ConfigError
from engine.types import GenerateOutput, GenerateRequest
from serving.rpc.client import NodeClient, StreamDeadlines
from serving.rpc.messages import NodeInfo
from serving.rpc.node_service import NodeService
from serving.rpc.server import start_server


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


def describe() -> NodeInfo:
    raise ConfigError("nobody asks")


@pytest.mark.filterwarnings("error")
async def test_a_late_write_to_a_cancelled_call_ends_it_quietly() -> None:
    source = LateSource()
    server = await start_server([NodeService(source, describe, {})], "127.0.0.1", 0, token=None)
    client = NodeClient(f"127.0.0.1:{server.port}", token=None)
    with capture_logs() as logs:
        stream = client.generate(
            GenerateRequest(request_id="r", prompt_token_ids=(1,)), StreamDeadlines()
        )
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(10):
            await source.closed.wait()
        await client.close()
        await server.close()
    assert not logs
