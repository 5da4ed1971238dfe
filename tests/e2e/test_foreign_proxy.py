"""The nodes behind a plain sequential PD proxy that knows nothing of Tandem; real processes, HTTP only."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NULLS = dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
)
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **NULLS}
FLAGS = ["--port", "0", "--kv-cache-memory-bytes", str(16 << 20), "--served-model-name", "tiny"]
PROMPT = [(11 * i) % 500 + 2 for i in range(90)]


class NodeProcess:
    """`python -m prefill_node` or `decode_node`, as a user starts it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    @classmethod
    async def start(cls, module: str, model: Path) -> "NodeProcess":
        """Returns when the node says that it serves."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, str(model), *FLAGS, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        async with asyncio.timeout(60):
            async for line in process.stderr:
                found = re.search(rb'"url": "(http://[^"]+)"', line)
                if found:
                    return cls(process, found[1].decode())
        raise AssertionError(f"{module} ended before it served")

    async def stop(self) -> int:
        """SIGTERM, then the exit status."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        await self.process.stderr.read()
        return await asyncio.wait_for(self.process.wait(), 30)


@pytest.fixture
async def pair(checkpoints: dict[str, Path]) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    p = await NodeProcess.start("prefill_node", checkpoints["qwen3_5"])
    d = await NodeProcess.start("decode_node", checkpoints["qwen3_5"])
    yield p, d
    assert [await p.stop(), await d.stop()] == [0, 0]


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(
        f"{url}/v1/completions", json=body, headers={"X-Request-Id": "same-on-both"}
    ) as reply:
        text = await reply.text()
        assert reply.status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer


async def stream_ids(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> list[int]:
    ids: list[int] = []
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
    return ids


async def test_posting_to_p_and_then_to_d_streams_every_token(
    pair: tuple[NodeProcess, NodeProcess],
) -> None:
    p, d = pair
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 10,
        "min_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    async with aiohttp.ClientSession() as session:
        alone = await stream_ids(session, d.url, body)
        to_p = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        from_p = await post(session, p.url, to_p)
        params = from_p["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        pulled = await stream_ids(session, d.url, {**body, "kv_transfer_params": params})
        assert pulled == alone
        assert len(pulled) == 10
        async with session.get(f"{d.url}/metrics") as reply:
            metrics = await reply.text()
    assert re.search(r"vllm:nixl_bytes_transferred_count\{[^}]*\} 1\.0", metrics)


WRONG_PARAMS: tuple[object, ...] = (
    {"do_remote_prefill": True},
    {"do_remote_prefill": "yes"},
    {"do_remote_decode": True, "do_remote_prefill": True},
    {"unknown": 1},
    [],
)


async def test_wrong_parameters_are_a_typed_400(pair: tuple[NodeProcess, NodeProcess]) -> None:
    _, d = pair
    async with aiohttp.ClientSession() as session:
        for params in WRONG_PARAMS:
            body = {"model": "tiny", "prompt": PROMPT, "kv_transfer_params": params}
            async with session.post(f"{d.url}/v1/completions", json=body) as reply:
                assert reply.status == 400, params
                assert (await reply.json())["error"]["param"] == "kv_transfer_params"
        async with session.get(f"{d.url}/health") as reply:
            assert reply.status == 200
