"""Metrics of hand-overs, under the names that dashboards made for vLLM look for."""

import asyncio
from pathlib import Path

import msgspec

from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import DamagedReads, HeldPull, flip
from tests.support.nodes.asking import prefill_over_http
from tests.support.nodes.cluster import Cluster, generate, sample, settled, transfer_config, until
from tests.support.nodes.pairs import GREEDY, end_hold, hand_over, prefill, prompt_of, request_of
from tests.support.nodes.processes import Launcher

PROMPT = prompt_of(100, salt=3)
SMALL_STAGE = 4096
HISTOGRAMS = ("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors")
COUNTERS = (
    "num_failed_transfers",
    "num_failed_notifications",
    "num_kv_expired_reqs",
    "num_notifications_after_expiry",
)
STAGES = ("waiting_to_start", "in_progress", "completed_waiting")


async def test_a_pull_is_in_every_histogram_and_in_no_counter_of_failures(
    shared: Cluster, model: Path
) -> None:
    """The pull counts once, in however many stages it was read."""
    p, d = await shared.pair(model, d={"stage_bytes": SMALL_STAGE})
    done = await hand_over(p, d, PROMPT)
    moved = done.last.kv_transfer
    assert moved is not None
    assert [sample(d, f"vllm:nixl_{name}_count") for name in HISTOGRAMS] == [1] * 4
    assert [sample(p, f"vllm:nixl_{name}_count") for name in HISTOGRAMS] == [0] * 4
    total = moved.attention_bytes + moved.state_bytes
    assert total > 2 * SMALL_STAGE
    assert sample(d, "vllm:nixl_bytes_transferred_sum") == total
    assert sample(d, "vllm:nixl_post_time_seconds_sum") <= sample(
        d, "vllm:nixl_xfer_time_seconds_sum"
    )
    for node in (p, d):
        assert [sample(node, f"vllm:nixl_{name}_total") for name in COUNTERS] == [0] * 4
    assert moved.verified
    assert sample(d, "tandem:kv_transfer_ttft_share_count") == 1
    assert 0 < sample(d, "tandem:kv_transfer_ttft_share_sum") < 1
    assert sample(p, "tandem:kv_transfer_ttft_share_count") == 0
    assert [stage(d, name) for name in STAGES] == [0, 0, 0]


async def test_what_a_lease_holds_is_counted_in_bytes_until_it_ends(
    shared: Cluster, model: Path
) -> None:
    p, d = await shared.pair(model)
    params = await prefill(p, PROMPT)
    assert params.remote_block_ids is not None
    plan = p.engine.core.scheduler.cache.plan
    expected = sum(
        plan.block_bytes(group) * len(ids) for group, ids in enumerate(params.remote_block_ids)
    )
    assert sample(p, "tandem:held_lease_bytes") == expected > 0
    await generate(d, request_of(PROMPT, params=params))
    await settled(p)
    assert sample(p, "tandem:held_lease_bytes") == 0


async def test_prefills_that_nobody_pulls_are_counted_when_their_lease_runs_out(
    shared: Cluster, model: Path
) -> None:
    config = transfer_config(lease_s=0.2)
    p = await shared.start("prefill", model, kv_transfer_config=config)
    for _ in range(2):
        await prefill(p, PROMPT)
    await settled(p)
    assert sample(p, "vllm:nixl_num_kv_expired_reqs_total") == 2


async def test_a_release_that_comes_too_late_is_counted(shared: Cluster, model: Path) -> None:
    """D reads while P gives the lease up; a repeated release finds nothing either."""
    held = HeldPull(FaultPoint.BEFORE_CONFIRM)
    p, d = await shared.pair(model, on_d=held)
    params = await prefill(p, PROMPT)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, params=params)))
    assert await asyncio.to_thread(held.reached.wait, 20)
    await end_hold(p, params)
    held.go.set()
    await asked
    await until(lambda: sample(p, "vllm:nixl_num_notifications_after_expiry_total") == 1)


async def test_a_lease_whose_bytes_cannot_be_verified_ends_at_once(
    shared: Cluster, model: Path
) -> None:
    """The lease ends before the end of the request that computes its prompt again."""
    faults = DamagedReads(lambda memory, spans: flip(memory, spans[0][1]), times=2)
    p, d = await shared.pair(model, on_d=faults)
    params = await prefill(p, PROMPT)
    long = msgspec.structs.replace(GREEDY, max_tokens=120)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, long, params)))
    await until(lambda: faults.hits == 2)
    await settled(p)
    assert not asked.done()
    assert not (await asked).last.was_pulled


async def test_what_a_dead_peer_does_not_hear_or_answer_is_counted(
    cluster: Cluster, real: Launcher
) -> None:
    p = real.node("prefill_node")
    config = transfer_config(lease_s=1.0, control_s=1.0)
    d = await cluster.start("decode", real.model, kv_transfer_config=config)
    answers = [await prefill_over_http(p.url, list(PROMPT)) for _ in range(2)]
    first, second = (msgspec.convert(answer, KVTransferParams) for answer in answers)
    await generate(d, request_of(PROMPT, params=first))
    assert sample(d, "vllm:nixl_num_failed_notifications_total") == 0
    p.kill()
    await until(lambda: sample(d, "vllm:nixl_num_failed_notifications_total") >= 1)
    assert not (await generate(d, request_of(PROMPT, params=second))).last.was_pulled
    assert sample(d, "vllm:nixl_num_failed_transfers_total") == 1


def stage(node: NodeServer, name: str) -> float:
    return sample(node, "vllm:num_requests_kv_fetch_by_stage", stage=name)
