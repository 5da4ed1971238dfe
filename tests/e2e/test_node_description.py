"""A node's description of itself to the proxy: what it has measured, and how its cache is cut."""

import asyncio
from contextlib import aclosing
from pathlib import Path

from prometheus_client import Metric

from engine.kv_cache.spec import AttentionSpec
from serving.node.server import NodeServer
from serving.rpc.client import NodeClient
from serving.rpc.messages import NodeInfo
from tests.e2e.test_prefix_cache import request_of
from tests.e2e.test_prefix_cache_pd import hand_over, prompt_of
from tests.support.nodes.cluster import Cluster, generate

S = 10.0


async def described(node: NodeServer) -> NodeInfo:
    client = NodeClient(f"127.0.0.1:{node.rpc.port}", token=None)
    try:
        return await client.describe(S)
    finally:
        await client.close()


async def test_rates_are_measured_where_the_work_is_done(cluster: Cluster, model: Path) -> None:
    p, d = await cluster.pair(model, enable_prefix_caching=True)
    before = [await described(node) for node in (p, d)]
    assert {info.prefill_tokens_per_s + info.link_bytes_per_s for info in before} == {0.0}
    await hand_over(p, d, prompt_of(300), max_tokens=20)
    of_p, of_d = [await described(node) for node in (p, d)]
    assert (of_p.prefill_tokens_per_s > 0, of_p.decode_tokens_per_s) == (True, 0.0)
    # All of the prompt came from P.
    assert (of_d.prefill_tokens_per_s, of_d.decode_tokens_per_s > 0) == (0.0, True)
    assert (of_p.link_bytes_per_s, of_d.link_bytes_per_s > 0) == (0.0, True)
    assert {info.num_waiting_tokens for info in (of_p, of_d)} == {0}


async def test_sizes_are_those_of_all_groups(shared: Cluster, checkpoints: dict[str, Path]) -> None:
    for family in ("qwen3_5", "gemma3"):
        node = await shared.start("prefill", checkpoints[family])
        info, plan = await described(node), node.engine.core.scheduler.cache.plan
        page_bytes = [
            len(group.layers) * group.spec.page_bytes(1)
            for group in plan.groups
            if isinstance(group.spec, AttentionSpec)
        ]
        assert info.kv_bytes_per_token == sum(page_bytes)
        states = [group.block_bytes(16) for group in plan.groups]
        assert info.state_bytes == sum(states) - 16 * sum(page_bytes)
        assert info.kv_events is None


async def test_prompts_that_wait_are_counted_in_tokens(cluster: Cluster, model: Path) -> None:
    node = await cluster.start("prefill", model, max_num_seqs=1)
    scheduler = node.engine.core.scheduler
    long = node.engine.generate(request_of(prompt_of(30), max_tokens=100))
    async with aclosing(long) as first:
        await anext(first)
        second = asyncio.create_task(generate(node, request_of(prompt_of(70))))
        while not scheduler.num_waiting:
            await anext(first)
        assert scheduler.num_waiting_tokens == 70
    await asyncio.wait_for(second, S)
    assert scheduler.num_waiting_tokens == 0


async def test_the_layout_is_a_metric(shared: Cluster, model: Path) -> None:
    node = await shared.start("prefill", model)
    plan = node.engine.core.scheduler.cache.plan
    (family,) = [
        found for found in node.metrics.registry.collect() if found.name == "vllm:cache_config_info"
    ]
    assert isinstance(family, Metric)
    (sample,) = family.samples
    assert sample.value == 1.0
    told = {name: sample.labels[name] for name in ("block_size", "hash_block_size")}
    assert told == {"block_size": "16", "hash_block_size": "16"}
    assert sample.labels["enable_prefix_caching"] == "False"
    num_tokens = 16 * int(sample.labels["num_gpu_blocks"])
    assert plan.units_for(num_tokens) <= plan.num_units < plan.units_for(num_tokens + 17)


async def test_units_are_told_by_what_they_hold(shared: Cluster, model: Path) -> None:
    node = await shared.start("prefill", model, enable_prefix_caching=True)
    cache = node.engine.core.scheduler.cache
    empty = (await described(node)).arena
    assert empty is not None and empty.num_units == cache.plan.num_units
    assert (empty.attention, empty.states, empty.idle_attention, empty.idle_states) == (0, 0, 0, 0)
    for _ in range(2):
        await generate(node, request_of(prompt_of(300)))
    info = await described(node)
    assert info.arena is not None
    # Nobody is served, so all that is not free is kept for reuse.
    kept = info.arena.idle_attention + info.arena.idle_states
    assert (info.arena.attention, info.arena.states) == (0, 0)
    assert info.arena.idle_states == cache.states.num_idle > 0 < info.arena.idle_attention
    assert kept == cache.plan.num_units - cache.pool.units.num_free_units
    assert info.prefix_query_tokens >= 300 and 0 < info.prefix_hit_tokens < 300
