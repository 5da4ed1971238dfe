"""Nodes that die or hang behind a real proxy: the same tokens or a clear error, and then as before.

SIGSTOP makes a process that keeps its connections and answers nothing.
"""

import asyncio
import json
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.api.node_double import client_of
from tests.support.nodes.asking import (
    Answer,
    ask,
    get,
    prefill_over_http,
    question,
    stream,
    streamed_ids,
)
from tests.support.nodes.cluster import until, with_context
from tests.support.nodes.pairs import arena_for, prompt_of
from tests.support.nodes.processes import Launcher, ServerProcess

PROMPT = list(prompt_of(100, salt=6))
BLOCKER = list(prompt_of(100, salt=7))
QUESTION = question(PROMPT)
HANGS = question(list(prompt_of(100, salt=8)), max_tokens=800)
SHORT = question(list(prompt_of(60, salt=9)), max_tokens=4)
T = TypeVar("T")
SOON_S = 30.0
USABLE = "tandem_proxy_available_nodes"
WAITING = "vllm:num_requests_waiting"
PULLS = "vllm:nixl_bytes_transferred_count"


async def test_without_p_the_tokens_are_the_same_and_p_is_used_again_when_it_is_back(
    real: Launcher,
) -> None:
    p, d, proxy = start(real)
    expected = (await ask(proxy.url, QUESTION)).token_ids
    assert d.metrics()[PULLS] == 1
    d.remember_start_value()
    p.kill()
    for _ in range(3):
        assert (await ask(proxy.url, QUESTION)).token_ids == expected
    assert d.metrics()[PULLS] == 1
    assert proxy.metrics()["tandem_proxy_local_prefills_total"] >= 1
    proxy.wait_for(USABLE, 1)
    again = real.node("prefill_node", "--port", str(p.port))
    proxy.wait_for(USABLE, 2)
    assert (await ask(proxy.url, QUESTION)).token_ids == expected
    assert d.metrics()[PULLS] == 2
    for node in (again, d):
        node.assert_at_rest()


async def test_without_d_there_is_a_clear_error_and_d_is_used_again_when_it_is_back(
    real: Launcher,
) -> None:
    """D can hold one sequence: one stands still after its first token while D is killed.

    It ends when nobody has come for --inter-token-timeout.
    """
    p, d, proxy = start(real, *small_arena(real), timeout_s=3)
    expected = (await ask(proxy.url, QUESTION)).token_ids
    p.remember_start_value()
    await prefill_over_http(d.url, BLOCKER)
    streaming = asyncio.create_task(stream(proxy.url, {**QUESTION, "stream": True}))
    asking = asyncio.create_task(ask(proxy.url, QUESTION))
    await asyncio.to_thread(d.wait_for, WAITING, 2)
    d.kill()
    *chunks, last = await streaming
    assert streamed_ids(chunks) == expected[:1]
    assert "broke off after 1 tokens" in last["error"]["message"]
    assert (await asking).error(503)
    for answer in (await ask(proxy.url, QUESTION), await get(proxy.url, "/ready")):
        assert_tells_nothing_inside(answer)
    proxy.wait_for(USABLE, 1)
    again = real.node("decode_node", "--port", str(d.port))
    proxy.wait_for(USABLE, 2)
    assert (await ask(proxy.url, QUESTION)).token_ids == expected
    assert again.metrics()[PULLS] == 1
    for node in (p, again):
        node.assert_at_rest()


async def test_a_stream_goes_on_on_the_d_that_takes_the_place_of_its_own(real: Launcher) -> None:
    p, d, proxy = start(real)
    body = question(PROMPT, max_tokens=250, temperature=1.0, seed=7)
    expected = (await ask(d.url, body)).token_ids
    events: list[dict[str, Any]] = []
    streaming = asyncio.create_task(stream(proxy.url, {**body, "stream": True}, events))
    await until(lambda: len(events) > 3)
    d.kill()
    proxy.wait_for(USABLE, 1)
    again = real.node("decode_node", "--port", str(d.port))
    assert streamed_ids(await streaming) == expected
    assert again.metrics()[PULLS] == 1
    for node in (p, again):
        node.assert_at_rest()


async def test_clients_that_leave_end_their_requests_on_d(real: Launcher) -> None:
    """D is full for longer than the test waits: only a cancellation takes them out of its queue."""
    p, d, proxy = start(real, *small_arena(real))
    await prefill_over_http(d.url, BLOCKER)
    async with client_of(proxy.url) as client:
        for body in (QUESTION, {**QUESTION, "stream": True}):
            asked = asyncio.create_task(client.post("/completions", body=body, cast_to=object))
            await asyncio.to_thread(d.wait_for, WAITING, 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await asyncio.to_thread(d.wait_for, WAITING, 0)
    assert d.metrics()["tandem:held_requests"] == 1
    p.assert_at_rest()


async def test_hung_nodes_cost_seconds_and_nobody_waits_for_their_timeouts(
    real: Launcher, tmp_path: Path
) -> None:
    # An answer that is still under way when its node has been found.
    real.model = with_context(real.model, tmp_path / "long", 2048)
    p, d, d2 = (real.launch(f"{kind}_node") for kind in ("prefill", "decode", "decode"))
    for node in (p, d, d2):
        node.wait_until_serving()
    proxy = real.proxy(p, d, "--decode", d2.url)
    proxy.wait_for(USABLE, 3)
    expected = (await ask(proxy.url, HANGS)).token_ids
    short = (await ask(proxy.url, SHORT)).token_ids
    streaming = asyncio.create_task(stream(proxy.url, {**HANGS, "stream": True}))
    hung = await node_at_work(streaming, d, d2)
    hung.signal(signal.SIGSTOP)
    # In turn: one of them on the node that hangs.
    answers = await soon(ask(proxy.url, SHORT), ask(proxy.url, SHORT))
    assert [answer.token_ids for answer in answers] == [short, short]
    (chunks,) = await soon(streaming)
    assert streamed_ids(chunks) == expected
    assert proxy.metrics()["tandem_proxy_broken_streams_total"] == 1
    p.signal(signal.SIGSTOP)
    (answer,) = await soon(ask(proxy.url, SHORT))
    assert answer.token_ids == short
    for node in (p, hung):
        node.signal(signal.SIGCONT)
    proxy.wait_for(USABLE, 3)
    for node in (p, d, d2):
        node.assert_at_rest()


def small_arena(real: Launcher) -> tuple[str, ...]:
    """Room for one sequence; what D itself holds stays as long as the test."""
    arena = ("--kv-cache-memory-bytes", str(arena_for(real.model, 120)))
    return *arena, *lease_flag(600.0)


def start(
    real: Launcher, *flags_of_d: str, timeout_s: float = 60
) -> tuple[ServerProcess, ServerProcess, ServerProcess]:
    """A prefill node whose leases end soon, a decode node, a proxy with --inter-token-timeout."""
    p = real.launch("prefill_node", *lease_flag(2.0))
    d = real.node("decode_node", *flags_of_d)
    p.wait_until_serving()
    return p, d, real.proxy(p, d, "--inter-token-timeout", str(timeout_s))


def lease_flag(seconds: float) -> tuple[str, str]:
    lease = {"kv_lease_duration": seconds}
    return "--kv-transfer-config", json.dumps({"kv_connector_extra_config": lease})


def assert_tells_nothing_inside(answer: Answer) -> None:
    error = answer.error(503)
    assert "no decode node is available" in error["message"]
    assert "127.0.0.1" not in error["message"]
    assert int(answer.headers["Retry-After"]) >= 1


async def node_at_work(
    streaming: "asyncio.Task[Any]", first: ServerProcess, second: ServerProcess
) -> ServerProcess:
    """The one that runs the request."""
    while not streaming.done():
        for node in (first, second):
            if node.metrics()["vllm:num_requests_running"]:
                return node
        await asyncio.sleep(0)
    pytest.fail("the answer was whole before its node was found")


async def soon(*asked: Awaitable[T]) -> list[T]:
    """Both answers, long before any timeout of a request."""
    async with asyncio.timeout(SOON_S):
        return await asyncio.gather(*asked)
