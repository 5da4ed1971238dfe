"""UCX aborts the process that serves P's arena over NIXL: P lives on, and so do hand-overs."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from connector.transports.nixl import NixlTransport
from connector.transports.nixl_server import OwnerProcess
from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import HeldPull
from tests.support.nodes.accounts import Account, peers_of
from tests.support.nodes.cluster import Cluster, generate, transfer_config, until
from tests.support.nodes.pairs import GREEDY, hand_over, prefill, prompt_of, request_of

PROMPT = prompt_of(100, salt=4)


@pytest.mark.parametrize("point", [None, FaultPoint.BEFORE_READ, FaultPoint.BEFORE_CONFIRM])
async def test_an_aborted_owner_costs_at_most_a_recompute(
    cluster: Cluster, model: Path, point: FaultPoint | None
) -> None:
    """Before D comes, or while it reads."""
    faults = HeldPull(point or FaultPoint.BEFORE_READ, nth=99 if point is None else 2)
    p, d = await cluster.pair(model, transfer_config("nixl"), on_d=faults)
    alone = await generate(p, request_of(PROMPT))
    assert (await hand_over(p, d, PROMPT)).last.was_pulled
    account = await Account.open(p, d)
    params = await prefill(p, PROMPT)
    if point is None:
        await abort_owner(p)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    if point is not None:
        assert await asyncio.to_thread(faults.reached.wait, 20)
        await abort_owner(p)
        faults.go.set()
    pair = await asked
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    again = await hand_over(p, d, PROMPT)
    assert (again.token_ids, again.logprobs) == (alone.token_ids, alone.logprobs)
    assert again.last.kv_transfer is not None
    assert again.last.kv_transfer.verified
    await account.close()


async def abort_owner(p: NodeServer) -> None:
    """Returns when another one serves."""
    transport = peers_of(p)._transport
    assert isinstance(transport, NixlTransport)
    owner, before = transport._server, transport.address
    assert isinstance(owner, OwnerProcess)
    os.kill(owner._process.pid, signal.SIGABRT)
    await until(lambda: transport.address != before)
