"""One prefill node hangs, another does not: the healthy one's prefills go through meanwhile.

SIGSTOP makes a process that takes connections and answers nothing. What hangs on it must still be
hanging when all else is done, and ends well once the process goes on.
"""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.support.nodes.accounts import claims_of
from tests.support.nodes.asking import remote_prefill
from tests.support.nodes.cluster import (
    BASE,
    Cluster,
    Generation,
    generate,
    sample,
    transfer_config,
    until,
)
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.pairs import GREEDY, count_near_ties, prompt_of, request_of
from tests.support.nodes.processes import Launcher, ServerProcess, transport_flag
from tests.tiers import everyday

PROMPT = prompt_of(100, salt=4)
NUM_HANGING = 6
PER_PEER = 3
# Long enough that nothing in these tests ends by a timeout.
CONTROL_S = 30.0


async def test_claims_at_a_peer_that_hangs_delay_no_other_claim(
    cluster: Cluster, real: Launcher
) -> None:
    hung, healthy = real.node("prefill_node"), real.node("prefill_node")
    d = await decode_node(cluster, real, "shm")
    alone = await generate(d, request_of(PROMPT))
    params = [await remote_prefill(hung.url, PROMPT) for _ in range(NUM_HANGING)]
    async with stopped(hung):
        waiting = start(d, params)
        await until(lambda: len(claims_of(d).all()) == NUM_HANGING)
        await check_others(d, healthy, alone)
        assert not any(task.done() for task in waiting)
    count_near_ties([alone] * NUM_HANGING, await asyncio.gather(*waiting))


@pytest.mark.parametrize("transport", everyday(("shm", "nixl"), ("nixl",)))
async def test_pulls_from_a_peer_that_hangs_delay_no_other_pull(
    cluster: Cluster, real: Launcher, transport: str
) -> None:
    hung, healthy = (
        real.node("prefill_node", *transport_flag(transport), UCX_TLS="tcp") for _ in range(2)
    )
    d = await decode_node(cluster, real, transport)
    alone = await generate(d, request_of(PROMPT))
    params = [await remote_prefill(hung.url, PROMPT) for _ in range(NUM_HANGING)]
    go_on = threading.Event()

    def hold() -> None:
        assert go_on.wait(CONTROL_S)

    engine_waits = asyncio.create_task(run_in_engine(d.engine, hold))
    waiting = start(d, params)
    await until(lambda: sum(claim.peer is not None for claim in claims_of(d).all()) == NUM_HANGING)
    async with stopped(hung):
        go_on.set()
        await engine_waits
        await until(lambda: len(d.engine.core.scheduler.loads) == NUM_HANGING)
        await until(lambda: stages(d) == (NUM_HANGING - PER_PEER, PER_PEER))
        await check_others(d, healthy, alone)
        assert not any(task.done() for task in waiting)
    done = await asyncio.gather(*waiting)
    count_near_ties([alone] * NUM_HANGING, done)
    assert all(one.last.was_pulled for one in done)


async def decode_node(cluster: Cluster, real: Launcher, transport: str) -> NodeServer:
    """Patient enough, and with fewer pull threads than are going to hang.

    It cuts its blocks differently and so asks for digests, since memory can be read over shm of a
    process that hangs.
    """
    config = transfer_config(transport, control_s=CONTROL_S)
    pulls = {"max_concurrent_pulls": 4, "max_concurrent_pulls_per_peer": PER_PEER}
    extra = config.kv_connector_extra_config | pulls
    config = msgspec.structs.replace(config, kv_connector_extra_config=extra)
    return await cluster.start(
        "decode", real.model, block_size=2 * BASE.block_size, kv_transfer_config=config
    )


async def check_others(d: NodeServer, healthy: ServerProcess, alone: Generation) -> None:
    """Hand-overs from the healthy node, and a request without any, while the other node hangs."""
    for _ in range(3):
        pulled = await generate(
            d, request_of(PROMPT, GREEDY, await remote_prefill(healthy.url, PROMPT))
        )
        count_near_ties([alone], [pulled])
        assert pulled.last.kv_transfer is not None
        assert pulled.last.kv_transfer.state_bytes > 0
    count_near_ties([alone], [await generate(d, request_of(PROMPT))])


def start(d: NodeServer, params: list[KVTransferParams]) -> list[asyncio.Task[Generation]]:
    """A request on D for each prefill."""
    return [asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, one))) for one in params]


@asynccontextmanager
async def stopped(server: ServerProcess) -> AsyncIterator[None]:
    """The process does not run inside."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def stages(d: NodeServer) -> tuple[float, float]:
    """Pulls that wait for their turn and pulls that run, as Prometheus reads them."""
    name = "vllm:num_requests_kv_fetch_by_stage"
    return sample(d, name, stage="waiting_to_start"), sample(d, name, stage="in_progress")
