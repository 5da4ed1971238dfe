"""How many files a reader opens to follow one thing through the house, counted by running its way.

A file counts if one of its functions runs while the thing is on its way. The counts may only fall:
a change that needs one file more has to save another, or give its reason in the commit that raises
the number.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from serving.config import KVEventsConfig
from tests.support.cache.offload import forget, start_with_tiers, tier_config
from tests.support.nodes.asking import CHAT, ask, question
from tests.support.nodes.cluster import Cluster, generate
from tests.support.nodes.footprints import Footprints, watched
from tests.support.nodes.pairs import hand_over, prompt_of, request_of

FAR_APART_S: Final = 60.0
"""Between two polls of the proxy: what it asks nodes meanwhile is no part of a way."""

# Of each way the rooms that it leads through, and the most files of them that it may need. The
# choice of a node is on the way of events, the inside of the cache on none.
SEAM: Final = ("engine/sched/", "engine/kv_connector", "engine/kv_cache/listener", "engine/step")
WAYS: Final[dict[str, tuple[tuple[str, ...], int]]] = {
    "chat": (
        (
            *("proxy/access/", "proxy/metrics", "proxy/pd_flow", "proxy/request_state"),
            *("proxy/server", "serving/api/", "serving/http/", "serving/rpc/"),
            "engine/async_engine",
        ),
        30,
    ),
    "hand-over": (("connector/pd/", "connector/transports/", *SEAM), 30),
    "tier": (("connector/offload/", *SEAM), 14),
    "event": (("serving/kv_events/", "serving/node/", "proxy/routing/", "proxy/node_choice"), 18),
}


@pytest.fixture
def footprints() -> Iterator[Footprints]:
    with watched() as made:
        yield made


def check(way: str, files: set[str]) -> None:
    rooms, most = WAYS[way]
    opened = sorted(name for name in files if name.startswith(rooms))
    assert len(opened) <= most, f"{way}: {len(opened)} files, at most {most}: {opened}"


async def stream_chat(url: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + CHAT, json={**body, "stream": True}) as reply,
    ):
        assert (await reply.text()).endswith("data: [DONE]\n\n")


async def start_proxy(url: str) -> tuple[ProxyServer, str]:
    proxy = ProxyServer(ProxyConfig(decode=(url,), port=0), poll_interval_s=FAR_APART_S)
    await proxy.start()
    base = f"http://127.0.0.1:{proxy.port}"
    async with asyncio.timeout(20):
        while (await ask(base, question([5, 6]))).status != 200:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.05)
    return proxy, base


async def until_metric(url: str, name: str, least: float) -> None:
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/metrics") as reply:
                families = text_string_to_metric_families(await reply.text())
                samples = [sample for family in families for sample in family.samples]
            if any(sample.name == name and sample.value >= least for sample in samples):
                return
            await asyncio.sleep(0.05)


async def test_a_streamed_chat_from_the_client_to_the_engine_and_back(
    footprints: Footprints, cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    node = await cluster.start("decode", checkpoints["qwen3"], served_model_name=("tiny",))
    proxy, url = await start_proxy(node.url)
    with footprints.on() as files:
        await stream_chat(url)
    await proxy.close()
    check("chat", files)


async def test_the_blocks_and_states_of_a_prompt_from_p_to_d(
    footprints: Footprints, cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    p = await cluster.start("prefill", checkpoints["qwen3_5"])
    d = await cluster.start("decode", checkpoints["qwen3_5"])
    await hand_over(p, d, prompt_of(40))
    with footprints.on() as files:
        await hand_over(p, d, prompt_of(40, salt=1))
    check("hand-over", files)


async def test_what_a_tier_keeps_and_gives_back(
    footprints: Footprints, cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    config = tier_config(host_bytes=8 << 20)
    node = await start_with_tiers(cluster, checkpoints["qwen3_5"], config)
    with footprints.on() as files:
        await generate(node, request_of(prompt_of(60)))
        await forget(node)
        again = await generate(node, request_of(prompt_of(60)))
    assert again.last.num_cached_tokens
    check("tier", files)


async def test_an_event_of_a_cache_until_a_choice_counts_on_it(
    footprints: Footprints, cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    node = await cluster.start(
        "decode",
        checkpoints["qwen3"],
        served_model_name=("tiny",),
        enable_prefix_caching=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True),
    )
    proxy, url = await start_proxy(node.url)
    await until_metric(url, "tandem_proxy_kv_events_is_synced", 1.0)
    with footprints.on() as files:
        await ask(url, question(list(prompt_of(60))))
        await until_metric(url, "tandem_proxy_index_entries", 1.0)
        await ask(url, question(list(prompt_of(60))))
    await proxy.close()
    check("event", files)
