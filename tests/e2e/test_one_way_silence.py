"""One direction between D and P's control port is silent: bounded, the same tokens, no leak.

In one direction P hears all and its answers are lost; in the other it hears nothing.
"""

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from connector.pd.wire.params import ParamsSigner
from engine.errors import KVLoadError
from engine.types import KVTransferParams
from serving.config import KVTransferConfig
from serving.node.server import NodeServer
from tests.support.faults.fault_points import NO_FAULTS, FaultPoint
from tests.support.faults.faults import Armed, counted
from tests.support.network.tcp_relay import Relay, relay_to
from tests.support.nodes.accounts import at_rest, forget_peers, leases_of
from tests.support.nodes.cluster import BASE, Cluster, Generation, generate, transfer_config, until
from tests.support.nodes.pairs import GREEDY, prefill, prompt_of, request_of
from tests.tiers import l_shape

PROMPT = prompt_of(100, salt=4)
PATIENCE_S = 0.5
LEASE_S = 1.5
D_BLOCK_SIZE = 2 * BASE.block_size
# None: D has not been asked yet, and will have to shake hands.
MOMENTS = (
    None,
    FaultPoint.BEFORE_DIGESTS,
    FaultPoint.BEFORE_READ,
    FaultPoint.BEFORE_CONFIRM,
)


def impatient(policy: str) -> KVTransferConfig:
    config = transfer_config("shm", policy, LEASE_S, PATIENCE_S)
    extra = config.kv_connector_extra_config | {"transfer_timeout": PATIENCE_S}
    return msgspec.structs.replace(config, kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    ("direction", "policy"),
    l_shape(("there", "back"), ("recompute", "fail"), corner=("back", "recompute")),
)
async def test_silence_in_one_direction_is_bounded_and_changes_no_token(
    cluster: Cluster, model: Path, direction: str, policy: str
) -> None:
    """It begins somewhere between the handshake and the end of the read, and ends.

    D cuts its blocks differently, and so P is asked for digests. P may have been asked, and may
    have answered, by then; what D reads does not go that way.
    """
    faults, config = Armed(), impatient(policy)
    p, d = await cluster.pair(
        model, config, on_p=faults, on_d=faults, d={"block_size": D_BLOCK_SIZE}
    )
    alone = await generate(p, request_of(PROMPT))
    async with relay_to(p.rpc.port) as relay:
        await pull(p, d, relay, alone)
        for moment in MOMENTS:
            forget_peers(d)
            params = await prefill_behind(relay, p)
            if moment is None:
                relay.lost.add(direction)
            else:
                faults.nth(moment, lambda scene: relay.lost.add(direction))
            was_pulled = await pull_or_not(d, params, alone, policy)
            if moment is None:
                assert not was_pulled
            elif moment is FaultPoint.BEFORE_DIGESTS:
                assert was_pulled == (direction == "there")
            assert relay.lost == {direction}
            faults.inner = NO_FAULTS
            relay.heal()
            await at_rest(p)
            await until(lambda: not leases_of(p).all_held())
            await pull(p, d, relay, alone)
        forget_peers(d)
        await at_rest(d)


async def prefill_behind(relay: Relay, p: NodeServer) -> KVTransferParams:
    """P's answer, as if P were where the relay is."""
    params = msgspec.structs.replace(await prefill(p, PROMPT), remote_port=relay.port)
    return ParamsSigner(None).sign(params)


async def pull_or_not(
    d: NodeServer, params: KVTransferParams, alone: Generation, policy: str
) -> bool:
    """Whether D pulled; if not, what became of the request is what the policy says."""
    try:
        pair = await generate(d, request_of(PROMPT, GREEDY, params))
    except KVLoadError as error:
        assert policy == "fail"
        assert re.search("DEADLINE_EXCEEDED|transfer_failed", str(error))
        return False
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    was_pulled = pair.last.was_pulled
    assert was_pulled or policy == "recompute"
    return was_pulled


async def pull(p: NodeServer, d: NodeServer, relay: Relay, alone: Generation) -> None:
    """A hand-over through a relay that lets everything pass, over a new connection."""
    forget_peers(d)
    pair = await generate(d, request_of(PROMPT, GREEDY, await prefill_behind(relay, p)))
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert pair.last.was_pulled


async def test_renewals_that_are_lost_on_their_way_cost_a_recompute(
    cluster: Cluster, model: Path
) -> None:
    """The read stands still until P has given its lease up."""
    faults, config = Armed(), impatient("recompute")
    p, d = await cluster.pair(model, config, on_d=faults)
    alone = await generate(p, request_of(PROMPT))
    async with relay_to(p.rpc.port) as relay:
        holding = faults.hold(FaultPoint.BEFORE_READ)
        params = await prefill_behind(relay, p)
        asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
        assert await asyncio.to_thread(holding.reached.wait, 20)
        relay.lost.add("there")
        await at_rest(p)
        relay.heal()
        holding.go.set()
        pair = await asked
        assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
        assert not pair.last.was_pulled
        assert counted(p, "vllm:nixl_num_kv_expired_reqs") == 1
        forget_peers(d)
        await at_rest(d)
