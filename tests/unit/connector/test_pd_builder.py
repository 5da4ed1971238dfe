"""A connector that is built, or cannot be, and never serves: it leaves nothing behind."""

from contextlib import AsyncExitStack

import pytest

from connector.pd.connector import PdConnector
from engine.arena import ArenaMemory
from engine.model_configs.identity import ModelIdentity
from serving.config import KVTransferConfig
from serving.log_writer import LOSSES
from serving.metrics import NO_ROWS, NodeMetrics, Table
from serving.node.connector import NodeParts
from tests.support.cache.bare_pulls import PLAN
from tests.support.nodes.cluster import all_back
from tests.support.nodes.leaks import held_here

CONFIG = KVTransferConfig(kv_connector_extra_config={"transport": "shm"})


class Unread(NodeMetrics):
    """Takes no reading but its own, which is the last thing that a connector asks for."""

    def read(self, source: object, *, gauges: Table = NO_ROWS, counters: Table = NO_ROWS) -> None:
        if source is not LOSSES:
            raise ValueError("a reading of that name is there")


async def build(arena: ArenaMemory, metrics: NodeMetrics) -> None:
    resources = AsyncExitStack()
    node = NodeParts(
        PLAN,
        arena,
        metrics,
        wake=lambda: None,
        resources=resources,
        engine_id="p",
        host="127.0.0.1",
        cluster_token=None,
        tls=None,
        identity=lambda: ModelIdentity({}),
        max_model_len=1024,
        vocab_size=100,
        prefix_hash_seed="",
    )
    async with resources:
        PdConnector.builder(CONFIG)(node)


async def test_what_is_built_and_never_serves_is_closed_whole() -> None:
    arena = ArenaMemory(PLAN.arena_bytes)
    before = held_here()
    await build(arena, NodeMetrics("m", "p"))
    await all_back(before)
    arena.close()


@pytest.mark.parametrize("part", ["an early part", "the last part"])
async def test_a_part_that_cannot_be_built_leaves_none_of_those_before_it(part: str) -> None:
    arena = ArenaMemory(PLAN.arena_bytes)
    metrics: NodeMetrics = Unread("m", "p")
    if part == "an early part":
        metrics = NodeMetrics("m", "p")
        await build(arena, metrics)  # from now on its names are taken
    before = held_here()
    with pytest.raises(ValueError, match=r"there|Duplicated"):
        await build(arena, metrics)
    await all_back(before)
    arena.close()
