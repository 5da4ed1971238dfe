"""A prefill node stands still for longer than its leases and then goes on, late for everything.

SIGSTOP stops a process in whatever it does; to others it is silent, and its clock goes on.
"""

import asyncio
import signal

import pytest

from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import HeldPull, counted, recomputed
from tests.support.nodes.accounts import at_rest
from tests.support.nodes.asking import remote_prefill
from tests.support.nodes.cluster import Cluster, generate, transfer_config, until
from tests.support.nodes.pairs import GREEDY, prompt_of, request_of
from tests.support.nodes.processes import Launcher, ServerProcess, transport_flag

PROMPT = prompt_of(100, salt=4)
LEASE_S = 0.8
STOPPED_S = 1.2
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


@pytest.mark.parametrize("point", [FaultPoint.AFTER_READ, FaultPoint.BEFORE_CONFIRM], ids=str)
async def test_p_that_slept_through_its_lease_vouches_for_nothing(
    cluster: Cluster, real: Launcher, point: FaultPoint
) -> None:
    """It has woken up and let go before D looks; whatever D has said meanwhile comes too late."""
    faults = HeldPull(point)
    p, d = await pair_of_nodes(cluster, real, faults)
    alone = await generate(d, request_of(PROMPT))
    asked = asyncio.create_task(
        generate(d, request_of(PROMPT, GREEDY, await remote_prefill(p.url, PROMPT)))
    )
    assert await asyncio.to_thread(faults.reached.wait, 20)
    await sleep_through(p)
    await until(lambda: p.metrics()[EXPIRED] == 1)
    faults.go.set()
    pair = await asked
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert not pair.last.was_pulled
    assert counted(d, "tandem:kv_late_reads") == 1
    assert recomputed(d) == {"late_read": len(PROMPT)}
    again = await generate(d, request_of(PROMPT, GREEDY, await remote_prefill(p.url, PROMPT)))
    assert again.last.was_pulled
    await at_rest(d)
    await asyncio.to_thread(p.assert_at_rest)
    assert p.metrics()[EXPIRED] == 1


async def test_a_prefill_that_was_slept_through_is_right_and_the_next_one_is_pulled(
    cluster: Cluster, real: Launcher
) -> None:
    """D asks while P stands still; P answers when it goes on.

    D may even read before P has seen that the lease is over: an unchanged record proves the bytes.
    """
    p, d = await pair_of_nodes(cluster, real, HeldPull(FaultPoint.BEFORE_READ, nth=99))
    alone = await generate(d, request_of(PROMPT))
    params = await remote_prefill(p.url, PROMPT)
    p.signal(signal.SIGSTOP)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    await asyncio.sleep(STOPPED_S)
    assert not asked.done()
    p.signal(signal.SIGCONT)
    late = await asked
    assert (late.token_ids, late.logprobs) == (alone.token_ids, alone.logprobs)
    assert late.last.was_pulled != bool(recomputed(d))
    pair = await generate(d, request_of(PROMPT, GREEDY, await remote_prefill(p.url, PROMPT)))
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert pair.last.was_pulled
    await at_rest(d)
    await asyncio.to_thread(p.assert_at_rest)


async def pair_of_nodes(
    cluster: Cluster, real: Launcher, faults: HeldPull
) -> tuple[ServerProcess, NodeServer]:
    """P is a process with short leases; D is patient."""
    p = real.node("prefill_node", *transport_flag("shm", kv_lease_duration=LEASE_S))
    config = transfer_config("shm", control_s=30.0)
    d = await cluster.start("decode", real.model, faults=faults, kv_transfer_config=config)
    return p, d


async def sleep_through(p: ServerProcess) -> None:
    """P stands still until its leases are over."""
    p.signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    p.signal(signal.SIGCONT)
