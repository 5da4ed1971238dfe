"""Nodes that hang behind a real proxy: their requests soon go on on other nodes.

SIGSTOP makes a process that keeps its connections and answers nothing.
"""

import asyncio
import signal
from collections.abc import Awaitable
from typing import TypeVar

from tests.support.nodes.asking import ask, question, stream, streamed_ids
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import Launcher, ServerProcess

LONG = question(list(prompt_of(100, salt=8)), max_tokens=280)
SHORT = question(list(prompt_of(60, salt=9)), max_tokens=4)
T = TypeVar("T")
SOON_S = 20.0
USABLE = "tandem_proxy_available_nodes"


async def test_hung_nodes_cost_seconds_and_nobody_waits_for_their_timeouts(real: Launcher) -> None:
    p, d, d2 = (real.launch(f"{kind}_node") for kind in ("prefill", "decode", "decode"))
    for node in (p, d, d2):
        node.wait_until_serving()
    proxy = real.proxy(p, d, "--decode", d2.url)
    proxy.wait_for(USABLE, 3)
    expected = (await ask(proxy.url, LONG)).token_ids
    short = (await ask(proxy.url, SHORT)).token_ids
    streaming = asyncio.create_task(stream(proxy.url, {**LONG, "stream": True}))
    hung = await node_at_work(d, d2)
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


async def node_at_work(*nodes: ServerProcess) -> ServerProcess:
    """The one that runs a request."""
    while True:
        for node in nodes:
            if node.metrics()["vllm:num_requests_running"]:
                return node
        await asyncio.sleep(0)


async def soon(*asked: Awaitable[T]) -> list[T]:
    """Both answers, long before any timeout of a request."""
    async with asyncio.timeout(SOON_S):
        return await asyncio.gather(*asked)
