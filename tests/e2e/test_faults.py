"""Bytes that arrive otherwise than P has them, and leases that end too early: never a wrong token.

Nothing may stay behind on either node: the cluster fixture asserts that too.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.errors import KVLoadError, KVTransferParamsError, TransportError, UnavailableError
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.types import SamplingParams
from tests.support.cache.leases import HOLDING
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import (
    DamagedReads,
    HeldPull,
    LateBytes,
    Refusing,
    Span,
    counted,
    drop,
    flip,
    recomputed,
    swap,
)
from tests.support.faults.pulls import DIRECTIONS, PROMPT
from tests.support.nodes.accounts import claims_of, leases_of, peers_of
from tests.support.nodes.cluster import BASE, Cluster, generate, settled, transfer_config, until
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.pairs import (
    GREEDY,
    TRANSPORTS,
    assert_equal,
    end_hold,
    hand_over,
    prefill,
    prompt_of,
    request_of,
)
from tests.tiers import everyday, l_shape

FAILURES = "tandem:kv_verification_failures"
OTHER_SIZE = 2 * BASE.block_size
RETRIES = "tandem:kv_verification_retries"
EACH_TRANSPORT = pytest.mark.parametrize("transport", everyday(TRANSPORTS, ("shm",)))


class Places:
    """Where blocks and states lie among the spans of a read of seven blocks and more."""

    def __init__(self, model: Path) -> None:
        groups = read_config(model, None).groups
        self.plan: ArenaPlan = plan_arena(groups, BASE.block_size, BASE.kv_cache_memory_bytes)
        self.state = self.plan.state_groups[0]
        self.attention = next(g for g in range(len(groups)) if g not in self.plan.state_groups)

    def blocks(self, spans: Sequence[Span]) -> list[int]:
        """Where the attention blocks of a whole read begin."""
        size = self.plan.block_bytes(self.attention)
        state = self.plan.block_bytes(self.state)
        pages = [span for span in spans if span[2] != state]
        return [start + at for _, start, length in pages for at in range(0, length, size)]

    def flip_attention(self, memory: memoryview, spans: Sequence[Span]) -> None:
        flip(memory, self.blocks(spans)[0] + 3)

    def flip_state(self, memory: memoryview, spans: Sequence[Span]) -> None:
        size = self.plan.block_bytes(self.state)
        flip(memory, next(start for _, start, length in spans if length == size) + size - 1)

    def permute(self, memory: memoryview, spans: Sequence[Span]) -> None:
        blocks, size = self.blocks(spans), self.plan.block_bytes(self.attention)
        swap(memory, blocks[0], blocks[2], length=size)

    def cut_short(self, memory: memoryview, spans: Sequence[Span]) -> None:
        for block in self.blocks(spans)[3:]:
            drop(memory, block, self.plan.block_bytes(self.attention))


# The damage, and the blocks and states that it hits.
DAMAGES = {
    "flip_attention": (1, 0),
    "flip_state": (0, 1),
    "permute": (2, 0),
    "cut_short": (4, 0),
}


@EACH_TRANSPORT
async def test_without_faults_all_that_was_pulled_is_verified(
    shared: Cluster, model: Path, transport: str
) -> None:
    p, d = await shared.pair(model, transfer_config(transport))
    pair = await hand_over(p, d, PROMPT)
    stats = pair.last.kv_transfer
    assert stats is not None
    moved = stats.attention_bytes + stats.state_bytes
    assert counted(d, "tandem:kv_verified_bytes") == moved > 0
    for kind in ("attention", "state"):
        assert counted(d, FAILURES, kind=kind) == 0
    assert counted(d, RETRIES) == counted(d, "tandem:kv_unverified_transfers") == 0


# Damage is done where the reader has read to: what brought the bytes does not know of it.
DAMAGED = pytest.mark.parametrize(
    ("family", "direction", "transport", "damage"),
    l_shape(
        *(("qwen3_5", "nemotron_h"), DIRECTIONS, TRANSPORTS, DAMAGES),
        corner=("qwen3_5", "there", "shm", "permute"),
    ),
)


@DAMAGED
async def test_damage_is_found_and_only_what_it_hit_is_read_again(
    shared: Cluster,
    checkpoints: dict[str, Path],
    family: str,
    direction: str,
    transport: str,
    damage: str,
) -> None:
    faults = DamagedReads(getattr(Places(checkpoints[family]), damage))
    pull = await DIRECTIONS[direction](shared, checkpoints[family], transport, faults=faults)
    await pull.check(await pull.read(), was_pulled=True)
    assert faults.hits == counted(pull.reader, RETRIES) == 1
    found = tuple(counted(pull.reader, FAILURES, kind=kind) for kind in ("attention", "state"))
    assert found == DAMAGES[damage]
    assert recomputed(pull.reader) == {}


@DAMAGED
async def test_damage_that_comes_again_costs_a_recompute_and_no_token(
    shared: Cluster,
    checkpoints: dict[str, Path],
    family: str,
    direction: str,
    transport: str,
    damage: str,
) -> None:
    """The second read brings only what differed; of that, one byte is wrong again."""
    first = getattr(Places(checkpoints[family]), damage)

    def each_time(memory: memoryview, spans: Sequence[Span]) -> None:
        if faults.times:
            first(memory, spans)
        else:
            flip(memory, spans[0][1])

    faults = DamagedReads(each_time, times=2)
    pull = await DIRECTIONS[direction](shared, checkpoints[family], transport, faults=faults)
    await pull.check(await pull.read(), was_pulled=False)
    assert faults.hits == 2
    assert recomputed(pull.reader) == {"verification_failed": pull.kept.remote_num_tokens}
    assert counted(pull.reader, "tandem:kv_verified_bytes") == 0


async def test_a_pull_after_damage_is_not_damaged(shared: Cluster, model: Path) -> None:
    faults = DamagedReads(lambda memory, spans: flip(memory, spans[0][1]), times=2)
    pull = await DIRECTIONS["there"](shared, model, "shm", faults=faults)
    await pull.check(await pull.read(), was_pulled=False)
    again = await hand_over(pull.keeper, pull.reader, PROMPT)
    await pull.check(again, was_pulled=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_policy_fail_turns_damage_into_an_error_and_nothing_stays(
    shared: Cluster, model: Path, direction: str
) -> None:
    faults = DamagedReads(lambda memory, spans: flip(memory, spans[0][1]), times=2)
    pull = await DIRECTIONS[direction](shared, model, "shm", faults=faults, policy="fail")
    with pytest.raises(KVLoadError, match="could not be loaded: verification_failed"):
        await pull.read()
    await settled(pull.keeper)
    await settled(pull.reader)


@EACH_TRANSPORT
async def test_bytes_that_become_visible_late_are_read_again(
    shared: Cluster, model: Path, transport: str
) -> None:
    faults = LateBytes()
    p, d = await shared.pair(model, transfer_config(transport), on_d=faults)
    alone = await generate(p, request_of(PROMPT))
    pair = await hand_over(p, d, PROMPT)
    assert_equal(pair, alone, was_pulled=True)
    assert faults.hits == counted(d, RETRIES) == 1
    assert counted(d, FAILURES, kind="attention") == 7


HELD_AT = (FaultPoint.AFTER_READ, FaultPoint.BEFORE_CONFIRM)


@pytest.mark.parametrize(
    ("direction", "transport", "point"),
    l_shape(DIRECTIONS, TRANSPORTS, HELD_AT, corner=("there", "shm", FaultPoint.BEFORE_CONFIRM)),
    ids=str,
)
async def test_a_read_that_outlives_its_lease_is_not_believed(
    shared: Cluster, model: Path, direction: str, transport: str, point: FaultPoint
) -> None:
    faults = HeldPull(point)
    pull = await DIRECTIONS[direction](shared, model, transport, faults=faults)
    asked = asyncio.create_task(pull.read())
    assert await asyncio.to_thread(faults.reached.wait, 20)
    await end_hold(pull.keeper, pull.kept)
    await settled(pull.keeper)
    faults.go.set()
    await pull.check(await asked, was_pulled=False)
    assert recomputed(pull.reader) == {"late_read": pull.kept.remote_num_tokens}
    assert counted(pull.reader, "tandem:kv_late_reads") == 1


async def test_a_pull_ends_with_its_own_cause_whatever_a_heartbeat_finds_meanwhile(
    shared: Cluster, model: Path
) -> None:
    faults = HeldPull(FaultPoint.BEFORE_CONFIRM)
    p, d = await shared.pair(model, transfer_config(), on_d=faults)
    params = await prefill(p, PROMPT)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    assert await asyncio.to_thread(faults.reached.wait, 20)
    (claim,) = claims_of(d).all()
    claim.fail("lease_lost")
    await end_hold(p, params)
    faults.go.set()
    await asked
    assert claim.failure == "lease_lost"
    assert recomputed(d) == {"late_read": len(PROMPT)}
    await settled(d)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_lease_that_ends_while_its_request_waits_for_room(
    shared: Cluster, model: Path, policy: str
) -> None:
    """D hears of it before it begins to pull, and does what the policy says all the same."""
    config = transfer_config(policy=policy, lease_s=0.6)
    p, d = await shared.pair(model, config, d={"max_num_seqs": 1})
    alone = await generate(p, request_of(PROMPT))
    params = await prefill(p, PROMPT)
    endless = SamplingParams(max_tokens=BASE.max_model_len or 512, ignore_eos=True)
    first = asyncio.create_task(generate(d, request_of(prompt_of(5), endless)))
    await until(lambda: d.engine.core.scheduler.num_running == 1)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    await until(lambda: len(claims_of(d).all()) == 1)
    (claim,) = claims_of(d).all()
    await end_hold(p, params)
    await until(lambda: claim.failure == "lease_lost")
    first.cancel()
    if policy == "recompute":
        assert_equal(await asked, alone)
        assert recomputed(d) == {"lease_lost": len(PROMPT)}
    else:
        with pytest.raises(KVLoadError, match="could not be loaded: lease_lost"):
            await asked
    await asyncio.gather(first, return_exceptions=True)
    await settled(d)


@pytest.mark.parametrize("point", HELD_AT, ids=str)
async def test_a_lease_of_the_same_name_does_not_vouch_for_an_older_one(
    shared: Cluster, model: Path, point: FaultPoint
) -> None:
    faults = HeldPull(point)
    p, d = await shared.pair(model, transfer_config(), on_d=faults)
    alone = await generate(p, request_of(PROMPT))
    params = await prefill(p, PROMPT)
    held = params.remote_request_id
    assert held is not None
    asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    assert await asyncio.to_thread(faults.reached.wait, 20)
    leases = leases_of(p)
    lease = leases.claim(held)
    assert lease is not None
    leases.grant(held, lease.block_ids, lease.num_tokens, holding=HOLDING)
    faults.go.set()
    assert_equal(await asked, alone)
    assert recomputed(d) == {"late_read": len(PROMPT)}
    await settled(d)
    assert p.engine.core.scheduler.num_held == len(leases.all_held()) == 1
    await run_in_engine(p.engine, lambda: p.engine.core.scheduler.abort(held))


@EACH_TRANSPORT
async def test_p_that_does_not_vouch_for_a_read_costs_a_recompute(
    shared: Cluster, model: Path, transport: str
) -> None:
    faults = Refusing(FaultPoint.BEFORE_DIGESTS, TransportError)
    config = transfer_config(transport, lease_s=0.6)
    p, d = await shared.pair(model, config, on_p=faults, d={"block_size": OTHER_SIZE})
    alone = await generate(p, request_of(PROMPT))
    pair = await hand_over(p, d, PROMPT)
    assert_equal(pair, alone, was_pulled=False)
    assert recomputed(d) == {"transfer_failed": len(PROMPT)}
    await settled(p)


async def test_a_p_that_cannot_be_asked_is_met_anew(shared: Cluster, model: Path) -> None:
    """It is read without a question only while it answers."""
    faults = Refusing(FaultPoint.BEFORE_DIGESTS, UnavailableError)
    p, d = await shared.pair(model, transfer_config(), on_p=faults, d={"block_size": OTHER_SIZE})
    alone = await generate(p, request_of(PROMPT))
    assert_equal(await hand_over(p, d, PROMPT), alone)
    assert recomputed(d) == {"transfer_failed": len(PROMPT)}
    await settled(p)
    assert peers_of(d).known() == []


@EACH_TRANSPORT
async def test_what_p_has_hashed_is_verified_without_a_question(
    shared: Cluster, model: Path, transport: str
) -> None:
    """P would not answer one."""
    faults = Refusing(FaultPoint.BEFORE_DIGESTS, TransportError)
    p, d = await shared.pair(model, transfer_config(transport), on_p=faults)
    alone = await generate(p, request_of(PROMPT))
    params = await prefill(p, PROMPT)
    leases = leases_of(p)
    (lease,) = leases.all_held()
    digests = lease.digests
    assert digests is not None
    await until(lambda: len(digests._known) == sum(map(len, lease.block_ids)))
    pair = await generate(d, request_of(PROMPT, GREEDY, params))
    assert_equal(pair, alone)
    assert pair.last.kv_transfer is not None
    assert pair.last.kv_transfer.verified
    assert recomputed(d) == {}
    await settled(p)


async def test_once_p_has_vouched_a_release_that_it_does_not_hear_costs_nothing(
    shared: Cluster, model: Path
) -> None:
    """But its memory, until the lease runs out."""
    faults = Refusing(FaultPoint.BEFORE_RELEASE, KVTransferParamsError)
    p, d = await shared.pair(model, transfer_config(lease_s=0.6), on_p=faults)
    alone = await generate(p, request_of(PROMPT))
    pair = await hand_over(p, d, PROMPT)
    assert_equal(pair, alone, was_pulled=True)
    assert recomputed(d) == {}
    await settled(p)
    assert counted(p, "vllm:nixl_num_kv_expired_reqs") == 1


async def test_verification_can_be_switched_off(shared: Cluster, model: Path) -> None:
    """And is what finds the damage: without it nothing is retried or recomputed."""
    faults = DamagedReads(Places(model).flip_attention)
    config = transfer_config("shm", verify=False)
    p, d = await shared.pair(model, on_d=faults, d={"kv_transfer_config": config})
    pair = await hand_over(p, d, PROMPT)
    assert pair.last.was_pulled
    assert faults.hits == counted(d, "tandem:kv_unverified_transfers") == 1
    assert counted(d, RETRIES) == 0
