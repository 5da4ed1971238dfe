"""Real nodes publish what their caches hold, in hash blocks, and say where."""

from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.kv_cache.listener import CachedBlocks
from engine.kv_cache.prefix import PrefixDigests
from serving.config import KVEventsConfig
from serving.kv_events.wire import SNAPSHOT, BlockStored, decode
from serving.node.server import NodeServer
from serving.rpc.messages import KVEventsInfo, KVGroupInfo
from tests.e2e.test_node_description import described
from tests.e2e.test_prefix_cache import request_of
from tests.e2e.test_prefix_cache_pd import hand_over, prompt_of
from tests.support.cache.cache_model import walk
from tests.support.cache.dictionary_connector import DictionaryConnector
from tests.support.cache.recount import evict_all
from tests.support.nodes.cluster import Cluster, generate, settled
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.pairs import moved

PUBLISHES = KVEventsConfig(enable_kv_cache_events=True, topic="kv@pod@model")
WAIT_MS = 10_000
Announced = Counter[tuple[int | None, bytes]]


def told(info: KVEventsInfo) -> Announced:
    """The (group, hash) of each copy that a snapshot of the node names."""
    announced: Announced = Counter()
    for event in snapshot_of(info):
        hashes = [digest for digest in event.block_hashes if isinstance(digest, bytes)]
        announced.update((event.group_idx, digest) for digest in hashes)
    return announced


def snapshot_of(info: KVEventsInfo) -> list[BlockStored]:
    """The events of a snapshot."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger, asker.rcvtimeo = 0, WAIT_MS
        assert info.replay_endpoint is not None
        asker.connect(info.replay_endpoint)
        asker.send_multipart([b"", SNAPSHOT])
        found: list[BlockStored] = []
        while True:
            _, topic, _, payload = asker.recv_multipart()
            if not payload:
                return found
            assert topic == info.topic.encode()
            for event in decode(payload).events:
                assert isinstance(event, BlockStored)
                found.append(event)


def held(node: NodeServer) -> Announced:
    """All that the node's cache can find, walked through by brute force."""
    pool = node.engine.core.scheduler.cache.pool
    states = pool.plan.state_groups
    by_tail = [pool.trees[group].partial.values() for group in pool.plan.attention_groups]
    nodes = {node for every in by_tail for tails in every for node in tails.values()}
    inside = {key.digest for node in nodes for key in node.keys}  # ends inside a hash block
    found: Announced = Counter()
    for (group, digest, _), count in walk(pool).items():
        if group in states:  # a checkpoint is told in each Mamba group
            found.update(dict.fromkeys(((each, digest) for each in states), count))
        elif digest not in inside:
            found[group, digest] += count
    return found


@pytest.mark.parametrize(
    ("family", "attends"), [("qwen3_5", "full_attention"), ("kimi_linear", "mla_attention")]
)
async def test_a_snapshot_is_what_the_cache_holds(
    cluster: Cluster, checkpoints: dict[str, Path], *, family: str, attends: str
) -> None:
    nodes = [
        await cluster.start(
            kind,
            checkpoints[family],
            enable_prefix_caching=True,
            block_size=64,
            kv_events_config=PUBLISHES,
            prefix_hash_seed="seed",
        )
        for kind in ("prefill", "decode")
    ]
    prompts = [prompt_of(300), (*prompt_of(150), *prompt_of(40, seed=4)), prompt_of(30, seed=5)]
    for prompt in prompts:
        assert moved(await hand_over(nodes[0], nodes[1], prompt)).attention_bytes
    for node in nodes:
        await settled(node)
        info = (await described(node)).kv_events
        assert info is not None
        kinds = {KVGroupInfo("mamba"), KVGroupInfo(attends)}
        assert (info.hash_block_size, info.hash_seed, set(info.groups)) == (16, "seed", kinds)
        assert info.model_identity == node.identity.digest
        cache = node.engine.core.scheduler.cache
        announced = told(info)
        assert announced == held(node)
        attention = info.groups.index(KVGroupInfo(attends))
        for prompt in prompts:
            prefix = PrefixDigests(cache.hasher, list(prompt), None)
            assert {(attention, digest) for digest in prefix.boundaries()[1:]} <= announced.keys()
        await run_in_engine(node.engine, partial(evict_all, cache))
        await generate(node, request_of(prompt_of(9), max_tokens=1))
        await settled(node)
        assert told(info) == held(node)


async def test_a_connector_hears_what_is_published(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    options = {"enable_prefix_caching": True, "kv_events_config": PUBLISHES}
    build = DictionaryConnector.builder
    node = await cluster.start_with(build, "prefill", checkpoints["qwen3"], **options)
    await generate(node, request_of(prompt_of(100)))
    await settled(node)
    info, connector = (await described(node)).kv_events, node.connector
    assert info is not None and isinstance(connector, DictionaryConnector)
    assert set(told(info)) == connector.scheduler.known | connector.scheduler.new.keys()


async def test_batches_that_find_the_queue_full_are_counted(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    config = msgspec.structs.replace(PUBLISHES, max_queue_size=1)
    node = await cluster.start(
        "prefill", checkpoints["qwen3"], enable_prefix_caching=True, kv_events_config=config
    )
    events = node.events
    assert events is not None

    def flood() -> None:
        while not events.publisher.num_dropped:
            events.recorder.removed(CachedBlocks(0, 0, 16, (bytes(32),), (0,)))
            events.publish()

    await run_in_engine(node.engine, flood)
    families = {family.name: family for family in node.metrics.registry.collect()}
    (sample,) = families["tandem:kv_event_batches_dropped"].samples
    assert sample.value == events.publisher.num_dropped > 0
