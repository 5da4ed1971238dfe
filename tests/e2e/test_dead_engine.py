"""A node whose engine died tells its callers so and ends, for whoever is to start it again."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.errors import EngineDeadError
from engine.types import GenerateRequest, SamplingParams
from serving.rpc.client import NodeClient, StreamDeadlines
from tests.support.nodes.asking import COMPLETIONS, question
from tests.support.nodes.processes import NODE_FLAGS, ServerProcess, kill_all

END_S = 20.0


async def test_callers_get_a_typed_error_and_the_process_ends_with_1(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """By HTTP and by gRPC, while they read."""
    flags = (*NODE_FLAGS, "--grpc-port", "0")
    root = str(Path(__file__).parents[2])
    node = ServerProcess.launch(
        tmp_path / "log",
        "tests.support.nodes.dying_node",
        str(checkpoints["qwen3"]),
        *flags,
        PYTHONPATH=root,
    )
    try:
        node.wait_until_serving()
        (line,) = [line for line in node.said.splitlines() if "node serves" in line]
        target = f"127.0.0.1:{json.loads(line)['grpc_port']}"
        begun = [asyncio.Event(), asyncio.Event()]
        readers = asyncio.gather(_read_http(node.url, begun[0]), _read_grpc(target, begun[1]))
        async with asyncio.timeout(END_S):
            for event in begun:
                await event.wait()
            os.kill(node.process.pid, signal.SIGUSR1)
            event, error = await readers
        assert event["error"]["type"] == "server_error"
        assert event["error"]["message"] == str(error)
        assert "broken on purpose" not in str(error)
        assert await asyncio.to_thread(node.process.wait, END_S) == 1
        assert "error: the engine died: AssertionError('broken on purpose')" in node.said
    finally:
        kill_all([node])


async def _read_http(url: str, begun: asyncio.Event) -> dict[str, Any]:
    """The last event of a stream."""
    last: dict[str, Any] = {}
    body = question([5, 6, 7], max_tokens=390, stream=True)
    async with aiohttp.ClientSession(url) as http, http.post(COMPLETIONS, json=body) as reply:
        async for line in reply.content:
            begun.set()
            if line.startswith(b"data: {"):
                last = json.loads(line[6:])
    return last


async def _read_grpc(target: str, begun: asyncio.Event) -> EngineDeadError:
    client = NodeClient(target, token=None)
    sampling = SamplingParams(max_tokens=390, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt_token_ids=(5, 6), sampling=sampling)
    try:
        with pytest.raises(EngineDeadError) as caught:
            async for _ in client.generate(request, StreamDeadlines()):
                begun.set()
        return caught.value
    finally:
        await client.close()
