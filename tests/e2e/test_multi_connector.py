"""PdConnector and OffloadConnector under one MultiConnector: one load from both, and its counts."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from connector.multi.connector import MultiConnector
from connector.pd.connector import PdConnector
from engine.errors import ConfigError
from engine.sched.stats import SOURCES
from serving.config import KVTransferConfig
from serving.node.connector import Build, NodeParts
from serving.node.server import NodeServer
from tests.e2e.test_prefix_cache import assert_same, conversation_prompts
from tests.e2e.test_seam import start
from tests.support.cache.dictionary_connector import DictionaryConnector, DictionaryScheduler
from tests.support.cache.offload import MIB, forget, stats_of, tiers_settled
from tests.support.faults.faults import counted
from tests.support.nodes.cluster import Cluster, generate, sample, settled
from tests.support.nodes.pairs import hand_over, moved, prompt_of, request_of

CHILDREN = ("PdConnector", "OffloadConnector")
PROMPT = prompt_of(150)
LONGER = (*PROMPT, *prompt_of(60, salt=5))


def both(folder: Path | None = None, **pd: Any) -> KVTransferConfig:
    """As in a user's configuration; `pd`: options of the PdConnector."""
    tiers: dict[str, Any] = {"host_bytes": 16 * MIB}
    if folder is not None:
        tiers = {"host_bytes": 3 * MIB, "disk_path": str(folder), "disk_bytes": 12 * MIB}
    children = [
        {"kv_connector": "PdConnector", "kv_connector_extra_config": pd},
        {"kv_connector": "OffloadConnector", "kv_connector_extra_config": tiers},
    ]
    extra = {"connectors": children}
    return KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra)


def by_child(node: NodeServer, what: str) -> dict[str, float]:
    name = f"vllm:kv_connector_{what}"
    return {child: counted(node, name, connector=child) for child in CHILDREN}


def check_counts(node: NodeServer) -> None:
    """Checks that the counts of both children and of all sources add up, with nothing under way."""
    queries, hits, misses = (by_child(node, what) for what in ("queries", "hits", "misses"))
    assert {child: hits[child] + misses[child] for child in CHILDREN} == queries
    for child in CHILDREN:
        assert sample(node, "vllm:kv_connector_pending_loads", connector=child) == 0
    sources = [counted(node, "vllm:prompt_tokens_by_source", source=name) for name in SOURCES]
    assert min(sources) >= 0
    assert sum(sources) == counted(node, "vllm:prompt_tokens")


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
async def test_the_tier_brings_the_prefix_and_the_peer_the_rest(
    cluster: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    """D's tier has the attention of turn 1; of turn 2 P sends the new tokens, and its states."""
    p, d = await cluster.pair(
        checkpoints[family], d={"kv_transfer_config": both()}, enable_prefix_caching=True
    )
    first = await hand_over(p, d, LONGER[:150])
    await forget(d)
    found = await hand_over(p, d, LONGER)
    assert_same(found, await generate(p, request_of(LONGER)))
    assert 0 < moved(found).attention_bytes < moved(first).attention_bytes
    assert moved(found).state_bytes == moved(first).state_bytes
    hits, tokens = by_child(d, "hits"), by_child(d, "hit_tokens")
    assert (hits["PdConnector"], hits["OffloadConnector"]) == (2, 1)
    assert tokens["OffloadConnector"] >= 128
    assert sum(tokens.values()) == len(PROMPT) + len(LONGER)
    check_counts(d)
    await tiers_settled(d)
    await settled(p)


async def test_a_tier_keeps_nothing_of_a_chunk_that_a_peer_sent_in_part(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """P has freed the front of D's first block of a window; prompts that part in it read all."""
    model, sizes = checkpoints["gemma3"], {"enable_prefix_caching": True, "hash_block_size": 16}
    p = await cluster.start("prefill", model, block_size=16, **sizes)  # type: ignore[arg-type]
    d = await cluster.start(
        "decode",
        model,
        block_size=64,
        kv_transfer_config=both(),
        **sizes,  # type: ignore[arg-type]
    )
    await hand_over(p, d, PROMPT[:144])
    await forget(d)
    for length in (143, 128, 112, 100):
        parted = (*PROMPT[:length], *prompt_of(9, salt=length))
        found = await generate(d, request_of(parted))
        assert_same(found, await generate(p, request_of(parted)))
        await forget(d)
    await tiers_settled(d)
    await settled(p)


async def test_the_child_whose_tokens_are_worth_most_goes_first(
    cluster: Cluster, model: Path
) -> None:
    config = both(load_weight=100.0)
    p, d = await cluster.pair(model, d={"kv_transfer_config": config}, enable_prefix_caching=True)
    first = await hand_over(p, d, LONGER)
    await forget(d)
    again = await hand_over(p, d, LONGER)
    assert_same(again, first)
    assert moved(again).attention_bytes == moved(first).attention_bytes
    assert by_child(d, "hits")["OffloadConnector"] == 0
    check_counts(d)
    await tiers_settled(d)


async def test_a_tier_answers_while_no_peer_is_named(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Turns with a peer and without one in any order: tokens of a node without connectors."""
    model = checkpoints["nemotron_h"]
    p, d = await cluster.pair(
        model, d={"kv_transfer_config": both(tmp_path)}, enable_prefix_caching=True
    )
    alone = await cluster.start("prefill", model)
    prompts = conversation_prompts(Random(3), 12)
    for number, prompt in enumerate((*prompts, *prompts)):
        asked = hand_over(p, d, prompt) if number % 2 else generate(d, request_of(prompt))
        assert_same(await asked, await generate(alone, request_of(prompt)))
        if number % 4 == 3:
            await forget(d)
    assert min(by_child(d, "hits").values()) > 0
    assert not stats_of(d).failed_loads
    check_counts(d)
    await tiers_settled(d)
    await settled(p)


class OneGroup(DictionaryScheduler):
    """A connector from before models had several groups."""

    supports_hma = False


@pytest.mark.parametrize("beside_pd", [True, False])
async def test_a_connector_that_carries_one_group_is_refused_by_name(
    cluster: Cluster, checkpoints: dict[str, Path], *, beside_pd: bool
) -> None:
    def one_group(node: NodeParts) -> DictionaryConnector:
        made = DictionaryConnector.over(node)
        made.scheduler.__class__ = OneGroup
        return made

    children = {"PdConnector": PdConnector.builder(KVTransferConfig()), "OldConnector": one_group}
    joined = partial(MultiConnector.over, children)

    def builder(_: KVTransferConfig) -> Build:
        return joined if beside_pd else one_group

    name = "OldConnector" if beside_pd else "PdConnector"  # the name of BASE's configuration
    with pytest.raises(ConfigError, match=f"{name} carries one KV cache group"):
        await start(cluster, "decode", checkpoints["qwen3_5"], builder)
    node = await start(cluster, "decode", checkpoints["qwen3"], builder)
    await settled(node)
