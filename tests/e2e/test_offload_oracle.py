"""A tier never changes a token: the same requests with small tiers and without any."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from serving.node.server import NodeServer
from tests.e2e.test_prefix_cache import (
    PRESSED,
    assert_same,
    conversation_prompts,
    request_of,
    room_for,
)
from tests.support.cache.offload import (
    MIB,
    start_with_tiers,
    stats_of,
    tier_config,
    tiers_settled,
)
from tests.support.nodes.cluster import Cluster, generate
from tests.tiers import l_and_diagonal

FAMILIES = ("qwen3_5", "nemotron_h", "gemma3")
OTHERS = ("qwen3", "falcon_h1", "lfm2", "kimi_linear")
LARGE_BLOCKS = ("gemma3", "qwen3", "falcon_h1")  # of 64 tokens each: a unit has up to a MiB
TIERS = {
    "host": {"host_bytes": 6 * MIB},
    "disk": {"disk_bytes": 6 * MIB},
    "both": {"host_bytes": 3 * MIB, "disk_bytes": 12 * MIB},
}


def tiers(name: str, folder: Path, **extra: Any) -> dict[str, Any]:
    own: dict[str, Any] = {**TIERS[name], **extra}
    return {**own, "disk_path": str(folder)} if "disk_bytes" in own else own


@pytest.mark.parametrize(
    ("family", "name", "block_size"),
    [
        *l_and_diagonal(FAMILIES, TIERS, (16, 64), corner=("qwen3_5", "both", 16)),
        *(
            pytest.param(family, *one, marks=pytest.mark.long)
            for family in OTHERS
            for one in (("both", 16), ("disk", 64))
        ),
    ],
)
async def test_one_by_one(
    cluster: Cluster,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    *,
    family: str,
    name: str,
    block_size: int,
) -> None:
    model = checkpoints[family]
    is_large = block_size == 64 and family in LARGE_BLOCKS
    sizes: dict[str, Any] = {
        "block_size": block_size,
        "hash_block_size": 16,
        "kv_cache_memory_bytes": 4 * MIB if is_large else room_for(model, 1),
    }
    config = tier_config(
        **tiers(name, tmp_path, hybrid_chunk_size=32 if block_size == 64 else None)
    )
    on = await start_with_tiers(cluster, model, config, **sizes)
    off = await cluster.start("prefill", model)
    loaded = await compare_one_by_one(on, off)
    print(f"{family}, {name}: {loaded} tokens came from tiers; {stats_of(on)}")
    assert loaded
    await tiers_settled(on)


async def compare_one_by_one(on: NodeServer, off: NodeServer) -> int:
    """Asks both nodes the same; the tokens that tiers brought."""
    answered: tuple[int, ...] = ()
    prompts = conversation_prompts(Random(5), 30)
    for number, prompt in enumerate((*prompts, *prompts)):  # evicted, all of it, before it is back
        asked = (*answered, *prompt)[:380] if number % 3 == 0 else prompt
        found = await generate(on, request_of(asked))
        assert_same(found, await generate(off, request_of(asked)))
        answered = (*asked, *found.token_ids)
    assert not stats_of(on).failed_loads
    return on.engine.core.scheduler.stats.external_hits


@pytest.mark.parametrize("family", ["nemotron_h", "gemma3"])
async def test_all_at_once_under_pressure(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    model = checkpoints[family]
    config = tier_config(**tiers("both", tmp_path))
    memory = room_for(model, PRESSED)
    on = await start_with_tiers(cluster, model, config, kv_cache_memory_bytes=memory)
    off = await cluster.start("prefill", model)
    requests = [request_of(it, max_tokens=64) for it in conversation_prompts(Random(9), 32)]
    found, plain = [
        await asyncio.gather(*(generate(node, request) for request in requests))
        for node in (on, off)
    ]
    ties = sum(map(assert_same, found, plain))
    stats = on.engine.core.scheduler.stats
    print(
        f"{family}: {stats.num_preemptions} preemptions, {stats.external_hits} tokens, {ties} ties"
    )
    assert stats.external_hits
    await tiers_settled(on)
