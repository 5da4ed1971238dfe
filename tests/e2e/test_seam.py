"""A tier of a few lines behind the seam: alone, and beside the hand-over, for hybrid models."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from connector.multi.connector import MultiConnector
from connector.pd.connector import PdConnector
from serving.config import KVTransferConfig
from serving.node.connector import Build, BuilderOf
from serving.node.server import NodeServer
from tests.support.cache.dictionary_connector import DictionaryConnector, DictionaryScheduler
from tests.support.cache.recount import evict_all
from tests.support.nodes.cluster import Cluster, Generation, generate, settled, until
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.pairs import GREEDY, count_near_ties, prefill, prompt_of, request_of
from tests.tiers import everyday

HYBRIDS = ("qwen3_5", "nemotron_h")
PROMPT = prompt_of(150)


async def start(cluster: Cluster, kind: str, model: Path, builder_of: BuilderOf) -> NodeServer:
    return await cluster.start_with(builder_of, kind, model, enable_prefix_caching=True)


def both(config: KVTransferConfig) -> Build:
    """A dictionary whose tokens are worth more than a peer's."""
    children = {"pd": PdConnector.builder(config), "dictionary": DictionaryConnector.over}
    return partial(MultiConnector.over, children)


def dictionary_of(node: NodeServer) -> DictionaryConnector:
    connector = node.connector
    if isinstance(connector, MultiConnector):
        connector = connector.children["dictionary"]
    assert isinstance(connector, DictionaryConnector)
    return connector


async def forget(node: NodeServer) -> None:
    """Only the dictionary remembers, once it has read all that it saves."""
    scheduler = dictionary_of(node).scheduler
    await until(lambda: not scheduler.new)
    await settled(node)
    await run_in_engine(node.engine, partial(evict_all, node.engine.core.scheduler.cache))


def assert_equal(alone: Generation, found: Generation) -> None:
    assert count_near_ties([alone], [found]) == 0
    assert found.token_ids == alone.token_ids


@pytest.mark.parametrize("family", everyday(HYBRIDS, ("nemotron_h",)))
async def test_what_a_tier_has_is_loaded_and_gives_the_same_tokens(
    cluster: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    node = await start(cluster, "decode", checkpoints[family], DictionaryConnector.builder)
    first = await generate(node, request_of(PROMPT))
    await forget(node)
    again = await generate(node, request_of(PROMPT))
    assert_equal(first, again)
    stats = node.engine.core.scheduler.stats
    assert stats.external_hits >= 128
    assert not stats.recomputed_tokens
    await settled(node)


async def test_after_a_block_has_vanished_the_good_prefix_is_used(
    cluster: Cluster, model: Path
) -> None:
    alone = await start(cluster, "decode", model, DictionaryConnector.builder)
    first = await generate(alone, request_of(PROMPT))
    await forget(alone)
    tier = dictionary_of(alone)
    attention = [key for key in tier.worker.store if key[0] == attention_group(tier.scheduler)]
    del tier.worker.store[attention[4]]
    again = await generate(alone, request_of(PROMPT))
    assert_equal(first, again)
    stats = alone.engine.core.scheduler.stats
    assert set(stats.recomputed_tokens) == {"vanished"}
    await forget(alone)
    third = await generate(alone, request_of(PROMPT))  # the block was computed and stored again
    assert_equal(first, third)
    assert stats.recomputed_tokens["vanished"] <= len(PROMPT)
    await settled(alone)


def attention_group(scheduler: DictionaryScheduler) -> int:
    (group,) = set(range(len(scheduler.plan.groups))) - set(scheduler.plan.state_groups)
    return group


async def test_who_waits_for_a_tier_keeps_nobody_else_waiting(
    cluster: Cluster, model: Path
) -> None:
    alone = await start(cluster, "decode", model, DictionaryConnector.builder)
    tier = dictionary_of(alone).scheduler
    expected = await generate(alone, request_of(PROMPT))
    await forget(alone)
    tier.undecided.add(PROMPT[0])
    waiting = asyncio.create_task(generate(alone, request_of(PROMPT)))
    other = await generate(alone, request_of((PROMPT[0] + 1, *PROMPT[1:])))
    assert len(other.token_ids) == GREEDY.max_tokens
    assert not waiting.done() and alone.engine.core.scheduler.num_waiting == 1
    tier.undecided.clear()
    assert_equal(expected, await waiting)
    await settled(alone)


async def test_a_load_is_put_together_from_a_tier_and_a_peer(cluster: Cluster, model: Path) -> None:
    """The tier has the first turn's attention, P alone the state after the whole prompt."""
    p = await start(cluster, "prefill", model, PdConnector.builder)
    d = await start(cluster, "decode", model, both)
    longer = (*PROMPT, *prompt_of(60, salt=5))
    whole = await generate(d, request_of(longer, params=await prefill(p, longer)))
    await forget(d)
    shared = dictionary_of(d)
    shared.scheduler.state_ends.clear()  # attention only: the states come from P
    dropped = [key for key in shared.scheduler.known if key[0] != attention_group(shared.scheduler)]
    shared.scheduler.known -= set(dropped)
    shared.scheduler.weight = 2.0
    again = await generate(d, request_of(longer, params=await prefill(p, longer)))
    assert_equal(whole, again)
    assert whole.last.kv_transfer is not None and again.last.kv_transfer is not None
    moved, alone = again.last.kv_transfer, whole.last.kv_transfer
    assert moved.state_bytes == alone.state_bytes > 0
    assert 0 < moved.attention_bytes < alone.attention_bytes / 4
    await settled(d)
    await settled(p)
