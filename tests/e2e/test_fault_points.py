"""Something breaks at one named point of a hand-over: the same tokens or a typed error, no leak.

Bytes that arrive wrong and leases that end too early have more tests in test_faults.py; here pulls
have several stages, and whatever is done may be done after the n-th of them.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engine.errors import (
    DeadlineExceededError,
    KVLoadError,
    KVTransferParamsError,
    OverloadedError,
    TransferTimeoutError,
    TransportError,
    UnavailableError,
)
from engine.types import KVTransferParams
from serving.config import KVTransferConfig
from serving.node.server import NodeServer
from tests.support.faults.fault_points import NO_FAULTS, FaultInjector, FaultPoint
from tests.support.faults.faults import Armed, AtNth, Refusing, counted, flip, raising, recomputed
from tests.support.nodes.accounts import Account, at_rest, forget_peers
from tests.support.nodes.asking import prefill_over_http
from tests.support.nodes.cluster import BASE, Cluster, Generation, generate, transfer_config, until
from tests.support.nodes.pairs import (
    GREEDY,
    TRANSPORTS,
    arena_for,
    assert_equal,
    end_hold,
    hand_over,
    prefill,
    prompt_of,
    request_of,
)
from tests.support.nodes.processes import Launcher, transport_flag
from tests.tiers import everyday

PROMPT = prompt_of(100, salt=4)
OTHER = prompt_of(100, salt=9)
TOKENS = 120
STAGE_BYTES = 16 << 10
NUM_STAGES = 5
EXPIRED = "vllm:nixl_num_kv_expired_reqs"
RETRIES = "tandem:kv_verification_retries"
EACH_TRANSPORT = pytest.mark.parametrize("transport", everyday(TRANSPORTS, ("shm",)))


# --- before the handshake ------------------------------------------------------------------------

FAILURES = (
    UnavailableError,
    DeadlineExceededError,
    TransportError,
    KVTransferParamsError,
    OverloadedError,
)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_handshake_that_fails_costs_a_recompute_or_an_error_and_the_next_one_pulls(
    shared: Cluster, model: Path, policy: str
) -> None:
    faults = Armed()
    config = transfer_config(policy=policy, lease_s=0.6)
    p, d = await shared.pair(model, config, on_p=faults, d={"stage_bytes": STAGE_BYTES})
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    for kind in FAILURES:
        forget_peers(d)
        refusing = faults.nth(FaultPoint.BEFORE_HANDSHAKE, raising(kind))
        await recompute_or_fail(hand_over(p, d, PROMPT), alone, policy, told="refused by the test")
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
        assert refusing.passed == 2
    await account.close()


# --- after the n-th stage ------------------------------------------------------------------------


@EACH_TRANSPORT
async def test_a_byte_flipped_after_the_nth_stage_is_read_again(
    shared: Cluster, model: Path, transport: str
) -> None:
    faults = Armed()
    p, d = await shared.pair(
        model, transfer_config(transport), on_d=faults, d={"stage_bytes": STAGE_BYTES}
    )
    alone = await generate(p, request_of(PROMPT))
    for nth in range(1, NUM_STAGES + 1):
        flipping = faults.nth(FaultPoint.AFTER_READ, lambda s: flip(s.memory, s.spans[0][1]), nth)
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
        assert flipping.passed > NUM_STAGES
        assert counted(d, RETRIES) == nth
    await at_rest(p)
    await at_rest(d)


async def test_a_read_that_fails_at_any_stage_costs_a_recompute(
    shared: Cluster, model: Path
) -> None:
    faults = Armed()
    p, d = await shared.pair(model, transfer_config(), on_d=faults, d={"stage_bytes": STAGE_BYTES})
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    stages = [(FaultPoint.AFTER_READ, nth) for nth in range(1, NUM_STAGES + 1)]
    for failed, (point, nth) in enumerate([(FaultPoint.BEFORE_READ, 1), *stages], 1):
        kind = TransportError if nth % 2 else TransferTimeoutError
        refusing = faults.nth(point, raising(kind), nth)
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=False)
        assert refusing.passed == nth
        assert recomputed(d) == {"transfer_failed": failed * len(PROMPT)}
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
    await account.close()
    assert counted(p, EXPIRED) == 0


@EACH_TRANSPORT
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
async def test_blocks_that_p_uses_again_reach_no_answer(
    shared: Cluster, model: Path, transport: str, verify: bool
) -> None:
    """Blocks that were read before may be right: only the record of the lease tells."""
    faults = Armed()
    p, d = await tight_pair(shared, model, transfer_config(transport, verify=verify), faults)
    held_at = [(point, 1) for point in (FaultPoint.BEFORE_READ, FaultPoint.BEFORE_CONFIRM)]
    # Without verification a read has one stage.
    last = NUM_STAGES if verify else 1
    held_at += [(FaultPoint.AFTER_READ, nth) for nth in range(1, last + 1)]
    for point, nth in held_at:
        cause = await read_while_p_uses_the_blocks_again(p, d, faults, point, nth)
        assert cause == "late_read"


async def tight_pair(
    cluster: Cluster, model: Path, config: KVTransferConfig, faults: FaultInjector
) -> tuple[NodeServer, NodeServer]:
    """P has room for one sequence."""
    memory = arena_for(model, TOKENS)
    p = await cluster.start(
        "prefill", model, kv_transfer_config=config, kv_cache_memory_bytes=memory
    )
    d = await cluster.start(
        "decode", model, faults=faults, stage_bytes=STAGE_BYTES, kv_transfer_config=config
    )
    return p, d


async def read_while_p_uses_the_blocks_again(
    p: NodeServer, d: NodeServer, faults: Armed, point: FaultPoint, nth: int
) -> str:
    """P's next sequence takes the blocks that D is reading; returns why D recomputed."""
    alone, before = await generate(p, request_of(PROMPT)), recomputed(d)
    holding = faults.hold(point, nth)
    params = await prefill(p, PROMPT)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    assert await asyncio.to_thread(holding.reached.wait, 20)
    await end_hold(p, params)
    other = await prefill(p, OTHER)
    assert other.remote_block_ids == params.remote_block_ids
    holding.go.set()
    assert_equal(await asked, alone, was_pulled=False)
    assert (await generate(d, request_of(OTHER, GREEDY, other))).last.was_pulled
    for node in (p, d):
        await at_rest(node)
    (cause,) = Counter(recomputed(d)) - Counter(before)
    return cause


@EACH_TRANSPORT
async def test_p_killed_after_the_nth_stage_costs_a_recompute_and_no_token(
    cluster: Cluster, real: Launcher, transport: str
) -> None:
    """Over shm no recompute either, if P has vouched before: its memory outlives it unchanged."""
    p = real.node("prefill_node", *transport_flag(transport), UCX_TLS="tcp")
    config = transfer_config(transport, control_s=30.0)
    faults = AtNth(FaultPoint.AFTER_READ, lambda scene: p.kill(), NUM_STAGES // 2)
    d = await cluster.start(
        "decode", real.model, faults=faults, stage_bytes=STAGE_BYTES, kv_transfer_config=config
    )
    alone = await generate(d, request_of(PROMPT))
    answered = await prefill_over_http(p.url, list(PROMPT), logprobs=GREEDY.logprobs)
    params = msgspec.convert(answered, KVTransferParams)
    pair = await generate(d, request_of(PROMPT, GREEDY, params))
    was_pulled = transport == "shm" and pair.last.was_pulled
    assert_equal(pair, alone, was_pulled=was_pulled)
    assert faults.passed >= NUM_STAGES // 2
    assert p.process.returncode == -signal.SIGKILL
    assert recomputed(d) == ({} if was_pulled else {"transfer_failed": len(PROMPT)})
    await at_rest(d)


# --- before and after the confirmation -----------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_read_that_is_never_confirmed_is_not_used(
    shared: Cluster, model: Path, policy: str
) -> None:
    faults = Armed()
    p, d = await shared.pair(
        model, transfer_config(policy=policy), on_d=faults, d={"stage_bytes": STAGE_BYTES}
    )
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    for kind in (TransportError, UnavailableError, DeadlineExceededError):
        faults.nth(FaultPoint.BEFORE_CONFIRM, raising(kind))
        await recompute_or_fail(hand_over(p, d, PROMPT), alone, policy)
    await account.close()
    assert counted(p, EXPIRED) == 0


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
async def test_a_lost_answer_to_the_release_frees_p_and_changes_nothing(
    shared: Cluster, model: Path, verify: bool
) -> None:
    """D has read the record of the lease before: nothing depends on the release."""
    faults, config = Armed(), transfer_config("shm", verify=verify)
    p, d = await shared.pair(model, on_p=faults, d={"kv_transfer_config": config})
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    for lost, kind in enumerate((UnavailableError, DeadlineExceededError, KVTransferParamsError)):
        faults.inner = Refusing(FaultPoint.AFTER_RELEASE, kind)
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
        await until(partial(failed_notifications, d, lost + 1))
        faults.inner = NO_FAULTS
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
        await at_rest(d)  # its release, in the background, is not the one that fails next
    await account.close()
    assert counted(p, EXPIRED) == 0


def failed_notifications(node: NodeServer, count: int) -> bool:
    return counted(node, "vllm:nixl_num_failed_notifications") == count


async def recompute_or_fail(
    asked: Awaitable[Generation],
    alone: Generation,
    policy: str,
    *,
    told: str = "could not be loaded: transfer_failed",
) -> None:
    """Asserts that a failed pull ends as `policy` says: recomputed and equal, or KVLoadError."""
    if policy == "recompute":
        assert_equal(await asked, alone, was_pulled=False)
        return
    with pytest.raises(KVLoadError, match=told):
        await asked


# --- at any point --------------------------------------------------------------------------------

RELEASES = (FaultPoint.BEFORE_RELEASE, FaultPoint.AFTER_RELEASE)


@EACH_TRANSPORT
async def test_a_hand_over_held_at_any_point_changes_nothing_and_delays_nobody_else(
    shared: Cluster, model: Path, transport: str
) -> None:
    """Only other hand-overs between the same nodes wait for their first handshake."""
    faults = Armed()
    p, d = await shared.pair(
        model,
        transfer_config(transport, control_s=30.0),
        on_p=faults,
        on_d=faults,
        d={"stage_bytes": STAGE_BYTES, "block_size": 2 * BASE.block_size},
    )
    alone = await generate(p, request_of(PROMPT))
    for point in FaultPoint:
        holding = faults.hold(point)
        asked = asyncio.create_task(hand_over(p, d, PROMPT))
        assert await asyncio.to_thread(holding.reached.wait, 20)
        if point in RELEASES:  # nobody waits for them
            assert_equal(await asked, alone, was_pulled=True)
        assert_equal(await generate(d, request_of(PROMPT)), alone, was_pulled=False)
        if point is not FaultPoint.BEFORE_HANDSHAKE:
            assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
        assert asked.done() == (point in RELEASES)
        holding.go.set()
        assert_equal(await asked, alone, was_pulled=True)
        await at_rest(p)
