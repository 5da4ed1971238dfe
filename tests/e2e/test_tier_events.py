"""KV events of tiers: routers hear what a node could load, under the tier's medium."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.kv_cache.prefix import PrefixDigests
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NO_HIT, NodeHit, RoutedPrompt
from serving.kv_events.wire import CPU, GPU, STORAGE
from serving.node.server import NodeServer
from serving.rpc.messages import KVEventsInfo
from tests.e2e.test_kv_events_of_nodes import PUBLISHES, snapshot_of
from tests.e2e.test_node_description import described
from tests.e2e.test_prefix_cache import assert_same, conversation_prompts, request_of, room_for
from tests.support.cache.offload import (
    MIB,
    forget,
    start_with_tiers,
    tier_config,
    tiers_of,
    tiers_settled,
)
from tests.support.nodes.cluster import Cluster, generate, until
from tests.tiers import l_shape

Announced = Counter[tuple[int | None, str | None, bytes]]
ALL = {"host_bytes": 3 * MIB, "disk_bytes": 32 * MIB}


async def started(cluster: Cluster, model: Path, folder: Path, **changes: Any) -> NodeServer:
    config = tier_config(disk_path=str(folder), **ALL)
    changes = {"kv_events_config": PUBLISHES, **changes}
    return await start_with_tiers(cluster, model, config, **changes)


async def info_of(node: NodeServer) -> KVEventsInfo:
    info = (await described(node)).kv_events
    assert info is not None
    return info


async def announced(node: NodeServer) -> Announced:
    """Counts the copies in tiers after the arena, as a router that comes now hears of them."""
    found: Announced = Counter()
    for event in snapshot_of(await info_of(node)):
        if event.medium != GPU:
            assert len(event.token_ids) in (0, len(event.block_hashes) * event.block_size)
            found.update((event.group_idx, event.medium, own) for own in event.block_hashes)  # type: ignore[misc]
    return found


def held(node: NodeServer, prompts: list[tuple[int, ...]]) -> Announced:
    """The hash blocks and checkpoints of every item in a tier, found again in the prompts."""
    cache = node.engine.core.scheduler.cache
    states = cache.plan.state_groups
    ends: dict[bytes, tuple[PrefixDigests, int]] = {}
    for prompt in prompts:
        prefix = PrefixDigests(cache.hasher, list(prompt), None)
        ends |= {prefix.digest_at(end): (prefix, end) for end in range(1, len(prompt) + 1)}
    found: Announced = Counter()
    for entry in tiers_of(node).scheduler.index:
        prefix, end = ends[entry.item.digest]
        media = [CPU] * (entry.host is not None) + [STORAGE] * (entry.file is not None)
        for medium in media:
            if entry.item.start == end:
                found.update((group, medium, entry.item.digest) for group in states)
                continue
            first, last = entry.item.start // 16 + 1, end // 16 + 1
            inside = prefix.boundaries()[first:last]
            found.update((entry.item.group, medium, digest) for digest in inside)
    return found


async def announced_tokens(node: NodeServer) -> dict[bytes, tuple[int, ...]]:
    """The tokens that the announcement of each hash in a tier told, by hash."""
    told: dict[bytes, tuple[int, ...]] = {}
    for event in snapshot_of(await info_of(node)):
        if event.medium != GPU:
            size = event.block_size
            for at, own in enumerate(event.block_hashes):
                assert isinstance(own, bytes)
                told[own] = event.token_ids[at * size : (at + 1) * size]
    return told


def tokens_of(node: NodeServer, prompts: list[tuple[int, ...]]) -> dict[bytes, tuple[int, ...]]:
    """By hash of any prefix the tokens since the last hash boundary before its end."""
    hasher, found = node.engine.core.scheduler.cache.hasher, {}
    for prompt in prompts:
        prefix = PrefixDigests(hasher, list(prompt), None)
        for end in range(1, len(prompt) + 1):
            found[prefix.digest_at(end)] = prompt[(end - 1) // 16 * 16 : end]
    return found


def remove_files(folder: Path) -> None:
    for file in folder.glob("tandem-*"):
        file.unlink()


async def hit(node: NodeServer, prompt: tuple[int, ...]) -> NodeHit:
    """The hit that a proxy which follows the node's events expects of it."""
    info, index = await info_of(node), PrefixIndex()
    index.set_node("node", info)
    index.apply("node", snapshot_of(info))
    return index.hits(RoutedPrompt(request_of(prompt))).get("node", NO_HIT)


@pytest.mark.parametrize(
    ("family", "block_size"),
    [
        ("nemotron_h", 64),
        ("gemma3", 16),
        ("lfm2", 16),
        pytest.param("kimi_linear", 64, marks=pytest.mark.long),
    ],
)
async def test_what_the_tiers_hold_is_announced(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, *, family: str, block_size: int
) -> None:
    model = checkpoints[family]
    changes = {"block_size": block_size, "kv_cache_memory_bytes": room_for(model, 1)}
    node = await started(cluster, model, tmp_path, hash_block_size=16, **changes)
    asked: list[tuple[int, ...]] = []
    # Blocks are also filled in pieces: answers that cross a hash boundary.
    for number, prompt in enumerate(conversation_prompts(Random(5), 24)):
        done = await generate(node, request_of(prompt, max_tokens=40))
        asked.append((*prompt, *done.token_ids))
        if number % 6 == 5:
            await tiers_settled(node)
            found = await announced(node)
            assert found == held(node, asked)
            told, true = await announced_tokens(node), tokens_of(node, asked)
            assert told == {own: true[own] for own in told}
    assert {medium for _, medium, _ in found} == {CPU, STORAGE}


@pytest.mark.parametrize(
    ("family", "tier"), l_shape(("qwen3", "gemma3"), ("host", "disk"), corner=("qwen3", "host"))
)
async def test_a_prompt_that_leaves_a_chunk_inside_loads_what_was_announced(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, *, family: str, tier: str
) -> None:
    """Blocks of 64 are chunks of 64 in a tier; prompts part from them at any hash block of 16."""
    model, prompt = checkpoints[family], tuple(range(5, 205))
    room = {"host": {"host_bytes": 3 * MIB}, "disk": {"disk_bytes": 32 * MIB}}[tier]
    path = {"disk_path": str(tmp_path)} if tier == "disk" else {}
    config = tier_config(**room, **path)
    sizes: dict[str, Any] = {"block_size": 64, "hash_block_size": 16}
    node = await start_with_tiers(cluster, model, config, kv_events_config=PUBLISHES, **sizes)
    alone = await cluster.start("decode", model)
    await generate(node, request_of(prompt))
    await forget(node)
    scheduler = node.engine.core.scheduler
    for shared in (48, 112, 70):
        asked = (*prompt[:shared], *range(300 + shared, 340 + shared))
        expected = (await hit(node, asked)).resumable
        assert expected == shared // 16 * 16
        before = scheduler.stats.external_hits
        done = await generate(node, request_of(asked))
        assert scheduler.stats.external_hits - before == expected
        assert_same(done, await generate(alone, request_of(asked)))
        await forget(node)


async def test_a_router_expects_of_a_folder_what_a_node_loads_from_it(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    prompt = tuple(range(5, 205))
    first = await started(cluster, model, tmp_path)
    done = await generate(first, request_of(prompt))
    asked = (*prompt, *done.token_ids, 9, 9)
    whole = await hit(first, asked)
    assert whole.resumable >= 192
    await forget(first)
    lower = await hit(first, asked)
    assert lower.resumable == whole.resumable
    assert lower.resumable_discount > whole.resumable_discount == 0
    await first.close()
    second = await started(cluster, model, tmp_path)
    await until(lambda: tiers_of(second).scheduler.index.num_items > 0)
    found = await hit(second, asked)
    assert found.resumable >= 192
    again = await generate(second, request_of(asked))
    stats = second.engine.core.scheduler.stats
    # The arena had nothing, and clients are told what the tiers had.
    assert (stats.prefix_hits, stats.external_hits) == (0, again.last.num_cached_tokens)
    # A router promises whole hash blocks; the node also has the tokens after the last of them.
    assert 0 <= stats.external_hits - found.resumable < 32
    await forget(second)
    remove_files(tmp_path)
    index = tiers_of(second).scheduler.index
    await until(lambda: all(entry.file is None for entry in index))
    await tiers_settled(second)
    assert not [medium for _, medium, _ in await announced(second) if medium == STORAGE]
