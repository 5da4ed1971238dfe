"""More pulls than a node may have: the one too many is computed here at once, or fails."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from engine.errors import KVLoadError
from serving.config import KVTransferConfig
from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import HeldPull, recomputed
from tests.support.nodes.cluster import Cluster, generate, sample, settled, transfer_config, until
from tests.support.nodes.pairs import count_near_ties, prefill, prompt_of, request_of


def one_at_a_time(policy: str) -> KVTransferConfig:
    """One pull runs, one waits."""
    config = transfer_config(policy=policy)
    pulls = {"max_concurrent_pulls": 1, "max_waiting_pulls": 1}
    extra = config.kv_connector_extra_config | pulls
    return msgspec.structs.replace(config, kv_connector_extra_config=extra)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_pull_too_many_delays_none_and_leaves_nothing(
    shared: Cluster, model: Path, policy: str
) -> None:
    held = HeldPull(FaultPoint.BEFORE_READ)
    p = await shared.start("prefill", model)
    config = one_at_a_time(policy)
    d = await shared.start("decode", model, faults=held, kv_transfer_config=config)
    prompts = [prompt_of(60, salt=salt) for salt in range(3)]
    alone = [await generate(p, request_of(prompt)) for prompt in prompts]
    requests = [request_of(prompt, params=await prefill(p, prompt)) for prompt in prompts]
    first = asyncio.create_task(generate(d, requests[0]))
    assert await asyncio.to_thread(held.reached.wait, 20)
    second = asyncio.create_task(generate(d, requests[1]))
    await until(lambda: waiting(d) == 1)
    if policy == "fail":
        with pytest.raises(KVLoadError, match="too_many_pulls"):
            await generate(d, requests[2])
    else:
        third = await generate(d, requests[2])
        assert count_near_ties(alone[2:], [third]) <= 1
        assert recomputed(d) == {"too_many_pulls": 60}
    assert not first.done() and not second.done()
    held.go.set()
    found = [await first, await second]
    assert all(generation.last.was_pulled for generation in found)
    assert count_near_ties(alone[:2], found) <= 1
    await settled(p)
    await settled(d)


def waiting(node: NodeServer) -> float:
    return sample(node, "vllm:num_requests_kv_fetch_by_stage", stage="waiting_to_start")
