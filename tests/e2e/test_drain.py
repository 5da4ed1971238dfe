"""SIGTERM: what runs may end, new requests go elsewhere, and what is cut says so in its body."""

import asyncio
import json
import os
import signal
from typing import Any

from tests.support.nodes.asking import ask, get, prefill_over_http, question, stream
from tests.support.nodes.pairs import arena_for, prompt_of
from tests.support.nodes.processes import Launcher, ServerProcess

PROMPT = list(prompt_of(100, salt=6))
BLOCKER = list(prompt_of(100, salt=7))
QUESTION = question(PROMPT)
RUNNING = "vllm:num_requests_running"
USABLE = "tandem_proxy_available_nodes"
PULLS = "vllm:nixl_bytes_transferred_count"
DRAIN_S = 4.0


async def test_a_decode_node_that_is_told_to_end_cuts_nothing_without_a_word(
    real: Launcher,
) -> None:
    """D has room for one sequence, which it holds for another node: all others stand still."""
    p = real.node("prefill_node")
    held = {"kv_connector_extra_config": {"kv_lease_duration": 600}}
    arena = ("--kv-cache-memory-bytes", str(arena_for(real.model, 120)))
    d = real.node(
        *("decode_node", *arena, "--kv-transfer-config", json.dumps(held)),
        *("--drain-timeout", str(DRAIN_S)),
    )
    # No D takes its place, for which an answer that has begun would wait.
    proxy = real.proxy(p, d, "--request-timeout", str(2 * DRAIN_S))
    await prefill_over_http(d.url, BLOCKER)
    params = await prefill_over_http(p.url, PROMPT)
    handed_over = {**QUESTION, "stream": True, "kv_transfer_params": params}
    by_http_1_0 = [
        asyncio.create_task(answer_by_http_1_0(d, body)) for body in (handed_over, QUESTION)
    ]
    behind_proxy = asyncio.create_task(stream(proxy.url, {**QUESTION, "stream": True}))
    await asyncio.to_thread(d.wait_for, "vllm:num_requests_waiting", 3)
    d.process.terminate()
    await asyncio.to_thread(proxy.wait_for, USABLE, 1)
    refused = await ask(d.url, QUESTION)
    assert "shutting down" in refused.error(503)["message"]
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await get(d.url, "/ready")).error(503)
    assert (await ask(proxy.url, QUESTION)).error(503)
    assert not behind_proxy.done()

    streamed, whole = await asyncio.gather(*by_http_1_0)
    assert streamed.startswith("HTTP/1.1 200")
    first, *_, last = [json.loads(line[6:]) for line in streamed.splitlines() if "data:" in line]
    assert len(first["choices"][0]["token_ids"]) == 1
    assert "shutting down" in last["error"]["message"]
    assert whole.startswith("HTTP/1.1 503")
    assert "shutting down" in json.loads(whole.splitlines()[-1])["error"]["message"]
    *_, last_event = await behind_proxy
    assert "broke off after 1 tokens" in last_event["error"]["message"]
    assert await asyncio.to_thread(d.process.wait, 20) == 0


async def test_p_waits_for_d_and_the_proxy_for_its_streams(real: Launcher) -> None:
    p, d = real.node("prefill_node", "--drain-timeout", "20"), real.node("decode_node")
    proxy = real.proxy(p, d)
    long = question(PROMPT, max_tokens=280)
    expected = (await ask(proxy.url, long)).token_ids
    params = await prefill_over_http(p.url, PROMPT)
    streaming = asyncio.create_task(stream(proxy.url, {**long, "stream": True}))
    await asyncio.to_thread(wait_for_work, d)
    for server in (p, proxy):
        server.process.terminate()
    await until_it_drains(proxy)
    handed_over = await ask(d.url, {**long, "kv_transfer_params": params})
    assert handed_over.token_ids == expected
    assert d.metrics()[PULLS] == 3
    chunks = await streaming
    assert [token for chunk in chunks for token in ids_of(chunk)] == expected
    for server in (p, proxy):
        assert await asyncio.to_thread(server.process.wait, 10) == 0


async def test_a_second_signal_ends_a_node_at_once(real: Launcher) -> None:
    p = real.node("prefill_node", "--drain-timeout", "600")
    await prefill_over_http(p.url, PROMPT)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(p.process.pid, number)
        await asyncio.sleep(0.5)
    assert await asyncio.to_thread(p.process.wait, 20) == 0


def wait_for_work(node: ServerProcess) -> None:
    while not node.metrics()[RUNNING]:
        pass


async def until_it_drains(server: ServerProcess) -> None:
    """A signal needs a moment to be heard."""
    async with asyncio.timeout(10):
        answer = await get(server.url, "/ready")
        while answer.status == 200:
            answer = await get(server.url, "/ready")
    assert answer.error(503)


def ids_of(chunk: dict[str, Any]) -> list[int]:
    return list(chunk["choices"][0].get("token_ids") or ())


async def answer_by_http_1_0(server: ServerProcess, body: dict[str, Any]) -> str:
    """All that came until the connection ended, which is how an answer ends there."""
    data = json.dumps(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n{data}".encode()
    )
    answer = await reader.read()
    writer.close()
    return answer.decode()
