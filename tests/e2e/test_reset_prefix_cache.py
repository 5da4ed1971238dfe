"""POST /reset_prefix_cache: nothing cached before is found, and nobody is hurt."""

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.kv_cache.listener import CachedBlocks
from proxy.config import ProxyConfig
from serving.config import KVEventsConfig
from serving.kv_events.recorder import AnnouncedGroup, EventRecorder
from serving.kv_events.wire import CPU, AllBlocksCleared, BlockRemoved
from serving.node.server import NodeServer
from tests.e2e.test_kv_events_of_nodes import snapshot_of
from tests.e2e.test_node_description import described
from tests.support.api.node_double import client_of, running_proxy, until_status, until_used
from tests.support.cache.offload import MIB, start_with_tiers, tier_config, tiers_of, tiers_settled
from tests.support.nodes.cluster import Cluster, generate, settled
from tests.support.nodes.pairs import GREEDY, prompt_of, request_of

ON: dict[str, Any] = {"enable_prefix_caching": True, "enable_reset_prefix_cache": True}
PROMPT = prompt_of(70)


async def reset(url: str, query: str = "") -> tuple[int, str]:
    asked = aiohttp.request("POST", f"{url}/reset_prefix_cache{query}")
    async with asked as reply:
        return reply.status, await reply.text()


async def cached(node: NodeServer) -> int:
    done = await generate(node, request_of(PROMPT, GREEDY))
    await settled(node)
    return done.last.num_cached_tokens


async def test_a_node_forgets_and_its_events_say_so(cluster: Cluster, model: Path) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True)
    node = await cluster.start("decode", model, kv_events_config=events, **ON)
    assert [await cached(node), await cached(node)] == [0, 64]
    info = (await described(node)).kv_events
    assert info is not None and snapshot_of(info)
    assert await reset(node.url) == (200, "")
    assert not snapshot_of(info)
    assert await cached(node) == 0
    status, text = await reset(node.url, "?reset_external=true")
    assert status == 400 and "reset_external is not supported" in text
    assert await cached(node) == 64


async def test_a_running_request_goes_on_and_the_caller_hears_why_nothing_happened(
    cluster: Cluster, model: Path
) -> None:
    node = await cluster.start("decode", model, **ON)
    long = request_of(PROMPT, msgspec.structs.replace(GREEDY, max_tokens=200))
    stream = node.engine.generate(long)
    first = await anext(stream)
    status, text = await reset(node.url)
    assert status == 503 and "1 requests run" in text and "try again" in text
    rest = [output async for output in stream]
    tokens = [token for output in (first, *rest) for token in output.token_ids]
    await settled(node)
    assert (await reset(node.url))[0] == 200
    assert tokens == (await generate(node, long)).token_ids


async def test_what_the_arena_had_alone_does_not_go_down_a_tier(
    cluster: Cluster, model: Path
) -> None:
    config = tier_config(host_bytes=3 * MIB)
    node = await start_with_tiers(cluster, model, config, enable_reset_prefix_cache=True)
    assert await cached(node) == 0
    assert (await reset(node.url))[0] == 200
    await tiers_settled(node)
    assert not list(tiers_of(node).scheduler.index)
    assert await cached(node) == 0


async def test_a_proxy_resets_all_nodes_or_names_those_that_refuse(
    cluster: Cluster, model: Path
) -> None:
    p = await cluster.start("prefill", model, **ON)
    d = await cluster.start("decode", model, enable_prefix_caching=True)
    config = ProxyConfig(prefill=(p.url,), decode=(d.url,), port=0, enable_reset_prefix_cache=True)
    assert (await reset(d.url))[0] == 404
    async with running_proxy(config) as base, client_of(base):
        await until_status(f"{base}/ready", 200)
        await until_used(base, 2)
        assert [await cached(p), await cached(p)] == [0, 64]
        status, text = await reset(base)
        assert status == 503 and "1 of 2 nodes were reset" in text
        assert f"{d.url}: it was started without --enable-reset-prefix-cache" in text
        assert await cached(p) == 0


@pytest.mark.parametrize("in_tier", [False, True])
def test_one_event_clears_all_unless_a_tier_has_something(in_tier: bool) -> None:
    recorder = EventRecorder([AnnouncedGroup("full_attention")], 2)
    block = CachedBlocks(0, 0, 2, (b"d",), (7,))
    if in_tier:
        recorder.stored_in(CPU, block, parent=b"p", token_ids=(1, 2), cache_salt=None)
    recorder.stored(block, b"p", (1, 2), cache_salt=None)
    recorder.take()
    recorder.removed(block)
    recorder.cleared()
    (event,) = recorder.take()
    assert isinstance(event, BlockRemoved if in_tier else AllBlocksCleared)
