"""Nodes that publish real KV events, and a proxy that follows them: what it knows, and when."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from serving.config import KVEventsConfig
from serving.kv_events.publisher import EventPublisher
from serving.kv_events.wire import GPU, BlockRemoved, BlockStored
from serving.rpc.messages import KVEventsInfo, KVGroupInfo
from tests.support.api.node_double import ScriptedNode, base_of, metric, running_cluster, until

SIZE = 4
PROMPT = list(range(40))
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 2}


@asynccontextmanager
async def publishing(*nodes: ScriptedNode) -> AsyncIterator[list[EventPublisher]]:
    """One publisher for each node, which says so when it is described."""
    publishers = [EventPublisher(KVEventsConfig(), node.engine_id) for node in nodes]
    try:
        for node, publisher in zip(nodes, publishers, strict=True):
            node.kv_events = info_of(publisher)
        yield publishers
    finally:
        for publisher in publishers:
            publisher.close()


def info_of(publisher: EventPublisher) -> KVEventsInfo:
    assert publisher.endpoint is not None
    return KVEventsInfo(
        endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        hash_block_size=SIZE,
        groups=(KVGroupInfo(kind="full_attention"),),
    )


def stored(tokens: Sequence[int]) -> BlockStored:
    hashes = tuple(PrefixDigests(PrefixHasher(SIZE), list(tokens), None).boundaries()[1:])
    return BlockStored(hashes, None, tuple(tokens), SIZE, medium=GPU, group_idx=0)


async def until_entries(base: str, label: str, count: int) -> None:
    async def has_come() -> bool:
        return await metric(base, "tandem_proxy_index_entries", node=label) == [count]

    await until(has_come)


async def routed_to(client: Any, prompt: Sequence[int]) -> tuple[str, str, int]:
    """(decode node, reason, tokens that the proxy counted on) of one request."""
    reply = await client.completions.create(**ASK, prompt=list(prompt))
    routing = reply.usage.model_extra["routing"]
    return routing["decode"], routing["reason"], routing["decode_hit_tokens"]


async def test_a_proxy_that_comes_late_learns_what_nodes_hold_and_what_changes() -> None:
    d1, d2 = ScriptedNode("d1"), ScriptedNode("d2")
    async with publishing(d1, d2) as (first, second):
        first.publish([stored(PROMPT[:20])])
        second.publish([stored(PROMPT)])
        # Two proxies, of which the second starts when the events are long past.
        for _ in range(2):
            async with running_cluster([], [d1, d2], enable_routing_details=True) as client:
                base = base_of(client)
                await until_entries(base, "d0", 5)
                await until_entries(base, "d1", 10)
                assert await routed_to(client, PROMPT) == (d2.url, "prefix", 36)
        async with running_cluster([], [d1, d2], enable_routing_details=True) as client:
            base = base_of(client)
            await until_entries(base, "d1", 10)
            second.publish([BlockRemoved(stored(PROMPT).block_hashes, GPU, 0)])
            await until_entries(base, "d1", 0)
            assert await routed_to(client, PROMPT) == (d1.url, "prefix", 20)
            assert await metric(base, "tandem_proxy_kv_events_is_synced", node="d0") == [1]


async def test_a_restarted_node_is_known_anew_within_seconds() -> None:
    d = ScriptedNode("d")
    async with publishing(d) as (old,):
        old.publish([stored(PROMPT)])
        async with running_cluster([], [d], enable_routing_details=True) as client:
            base = base_of(client)
            await until_entries(base, "d0", 10)
            # As a new process on the same HTTP port, with other ports for its events.
            old.close()
            d.name = "reborn"
            async with publishing(d) as (new,):
                new.publish([stored(PROMPT[:8])])
                async with asyncio.timeout(5.0):
                    await until_entries(base, "d0", 2)
                assert (await routed_to(client, PROMPT))[1:] == ("prefix", 8)
