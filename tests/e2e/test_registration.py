"""Real nodes that register with a proxy, and leave it while requests are under way."""

import asyncio
from pathlib import Path
from typing import Any

from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from tests.support.api.node_double import until
from tests.support.nodes.asking import ask, get, question
from tests.support.nodes.cluster import Cluster
from tests.support.nodes.pairs import prompt_of

NUM_REQUESTS = 24


async def until_nodes(url: str, **wanted: str) -> None:
    """Waits until /ready tells these stages."""

    async def are_reached() -> bool:
        answer = await get(url, "/ready")
        return answer.status == 200 and answer.body["nodes"] == wanted

    await until(are_reached)


async def test_nodes_come_and_go_without_a_failed_request(cluster: Cluster, model: Path) -> None:
    """D hands its place to another one, and so does P; every answer is that of one node."""
    proxy = ProxyServer(ProxyConfig(port=0, grpc_port=0), poll_interval_s=0.2)
    await proxy.start()
    options: dict[str, Any] = {"served_model_name": ("tiny",), "proxy": (proxy.url,)}
    p = await cluster.start("prefill", model, **options)
    d = await cluster.start("decode", model, **options)
    try:
        await until_nodes(proxy.url, p0="serving", d0="serving")
        questions = [question(list(prompt_of(60, salt=it)), max_tokens=24) for it in range(4)]
        expected = [(await ask(d.url, each)).token_ids for each in questions]
        asked = [
            asyncio.create_task(ask(proxy.url, questions[number % len(questions)]))
            for number in range(NUM_REQUESTS)
        ]
        await cluster.start("decode", model, **options)
        await until_nodes(proxy.url, p0="serving", d0="serving", d1="serving")
        for node in (d, p):
            await node.drain()
            await node.close()
        asked += [asyncio.create_task(ask(proxy.url, each)) for each in questions]
        answers = await asyncio.gather(*asked)
        assert [each.token_ids for each in answers] == expected * (len(asked) // len(expected))
        await until_nodes(proxy.url, d1="serving")
    finally:
        await proxy.close()
