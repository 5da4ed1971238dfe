"""Who is next: the first that came, and with --scheduling-policy priority who asks for it."""

import asyncio
from pathlib import Path

from engine.types import SamplingParams
from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from tests.support.nodes.asking import ask, question
from tests.support.nodes.cluster import Cluster, generate, until
from tests.support.nodes.pairs import prompt_of, request_of


async def test_a_proxy_passes_priorities_to_nodes_that_take_them(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """One seat, and three that wait: the most urgent first, then in the order of arrival."""
    node = await cluster.start(
        "decode",
        checkpoints["qwen3"],
        served_model_name=("tiny",),
        scheduling_policy="priority",
        max_num_seqs=1,
    )
    proxy = ProxyServer(ProxyConfig(decode=(node.url,), port=0))
    await proxy.start()
    url = f"http://127.0.0.1:{proxy.port}"
    async with asyncio.timeout(20):
        while (await ask(url, question([5, 6]))).status != 200:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.05)
    long = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    seated = asyncio.create_task(generate(node, request_of(prompt_of(9), long)))
    ended: list[int] = []

    async def wait_for_a_seat(priority: int) -> None:
        await ask(url, question([7, 8], priority=priority))
        ended.append(priority)

    scheduler = node.engine.core.scheduler
    waiting = []
    for priority in (0, 5, -5):
        waiting.append(asyncio.create_task(wait_for_a_seat(priority)))
        await until(lambda: scheduler.num_waiting == len(waiting) or seated.done())
    assert not seated.done()
    await asyncio.gather(seated, *waiting)
    assert ended == [-5, 0, 5]
    await proxy.close()
