"""A node that is killed in the middle of a hand-over: the other one loses neither token nor memory.

To hold the middle still, D's arena has room for one sequence and a prefill that D holds fills it.
So a request on D is accepted, has P's prefill claimed, has sent its first token, and waits.
"""

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from connector.pd.wire.control_client import ControlClient
from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.support.faults.faults import recomputed
from tests.support.nodes.asking import ask, prefill_over_http, question
from tests.support.nodes.cluster import BASE, Cluster, generate, settled, transfer_config, until
from tests.support.nodes.leaks import running_tasks
from tests.support.nodes.pairs import (
    GREEDY,
    TRANSPORTS,
    arena_for,
    end_hold,
    prefill,
    prompt_of,
    request_of,
)
from tests.support.nodes.processes import Launcher, ServerProcess, transport_flag
from tests.tiers import everyday

PROMPT = prompt_of(100, salt=4)
OTHER_CUTS = ("--block-size", str(2 * BASE.block_size))
BLOCKER = prompt_of(100, salt=8)
FAMILY = "qwen3_5"
TOKENS = 120
# Long enough that nothing in these tests ends by a timeout instead of by the peer's death.
CONTROL_S = 30.0
EACH_TRANSPORT = pytest.mark.parametrize("transport", everyday(TRANSPORTS, ("shm", "nixl")))


async def small_decode_node(
    cluster: Cluster, model: Path, transport: str, policy: str
) -> NodeServer:
    config = transfer_config(transport, policy, control_s=CONTROL_S)
    arena = arena_for(model, TOKENS)
    return await cluster.start(
        "decode", model, kv_transfer_config=config, kv_cache_memory_bytes=arena
    )


async def make_room(node: NodeServer, blocker: KVTransferParams) -> None:
    """Gives the prefill up that fills the node's arena."""
    await end_hold(node, blocker)


@EACH_TRANSPORT
async def test_p_killed_during_the_pull_costs_a_recompute_and_no_token(
    cluster: Cluster, real: Launcher, transport: str
) -> None:
    """P is asked for digests, as it cuts differently: its memory may be read while it stands still.

    Over shm, that is; and once it is dead.
    """
    p = real.node("prefill_node", *transport_flag(transport), *OTHER_CUTS, UCX_TLS="tcp")
    d = await small_decode_node(cluster, real.model, transport, "recompute")
    strict = await small_decode_node(cluster, real.model, transport, "fail")
    alone = await generate(d, request_of(PROMPT))
    bodies = [await remote_prefill(p) for _ in (d, strict)]
    blockers = [await prefill(node, BLOCKER) for node in (d, strict)]
    params = msgspec.convert(bodies[0]["kv_transfer_params"], KVTransferParams)
    pair = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    refused = asyncio.create_task(ask(strict.url, bodies[1]))
    for node in (d, strict):
        await until_waiting(node)
    p.signal(signal.SIGSTOP)
    for node, blocker in zip((d, strict), blockers, strict=True):
        await make_room(node, blocker)
        await until_loading(node)
    p.kill()
    assert (await pair).token_ids == alone.token_ids
    assert pair.result().logprobs == alone.logprobs
    assert not pair.result().last.was_pulled
    assert recomputed(d) == {"transfer_failed": len(PROMPT)}
    error = (await refused).error(502)
    assert "could not be loaded: transfer_failed" in error["message"]
    assert (await generate(strict, request_of(PROMPT))).token_ids == alone.token_ids


async def remote_prefill(p: ServerProcess) -> dict[str, Any]:
    """A request for D that P has prefilled."""
    prompt = list(PROMPT)
    params = await prefill_over_http(p.url, prompt, logprobs=GREEDY.logprobs)
    return question(prompt, model=None, kv_transfer_params=params)


@EACH_TRANSPORT
async def test_d_killed_with_a_claim_gives_p_its_memory_back(
    cluster: Cluster, real: Launcher, transport: str
) -> None:
    config = transfer_config(transport, lease_s=1.0)
    p = await cluster.start("prefill", real.model, kv_transfer_config=config)
    arena = ("--kv-cache-memory-bytes", str(arena_for(real.model, TOKENS)))
    d = real.node("decode_node", *transport_flag(transport), *arena)
    await prefill_over_http(d.url, list(BLOCKER))
    params = await prefill(p, PROMPT)
    body = question(list(PROMPT), kv_transfer_params=msgspec.to_builtins(params))
    asked = asyncio.create_task(ask(d.url, body))
    await asyncio.to_thread(d.wait_for, "vllm:num_requests_waiting", 1)
    assert p.engine.core.scheduler.num_held == 1
    d.kill()
    with pytest.raises(aiohttp.ClientError):
        await asked
    await settled(p)
    assert (await generate(p, request_of(PROMPT))).token_ids


async def test_a_p_that_hangs_costs_a_recompute_and_a_client_that_leaves_meanwhile_nothing(
    cluster: Cluster, real: Launcher
) -> None:
    p = real.node("prefill_node", *OTHER_CUTS)
    d = await cluster.start(
        "decode", real.model, kv_transfer_config=transfer_config("shm", control_s=0.5)
    )
    patient = await cluster.start(
        "decode", real.model, kv_transfer_config=transfer_config("shm", control_s=CONTROL_S)
    )
    expected = [await pull_from_a_late_peer(patient, p)]
    expected.append((await ask(d.url, await remote_prefill(p))).token_ids)
    bodies = [await remote_prefill(p) for _ in (d, patient)]
    p.signal(signal.SIGSTOP)
    tasks = len(running_tasks())
    leaving = asyncio.create_task(ask(patient.url, bodies[1]))
    answer = await ask(d.url, bodies[0])
    assert [answer.token_ids, answer.token_ids] == expected
    assert "kv_transfer" not in answer.body["usage"]
    assert not leaving.done()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    # Before a ping tells that P is gone: what its peers say to it now would be lost.
    p.signal(signal.SIGCONT)
    await until(lambda: len(running_tasks()) <= tasks)
    await release(
        bodies[0]["kv_transfer_params"]
    )  # what D itself said may have come too late for P
    await asyncio.to_thread(p.assert_at_rest)


async def pull_from_a_late_peer(d: NodeServer, p: ServerProcess) -> list[int]:
    """The first connection takes more than half a second, and is waited for."""
    body = await remote_prefill(p)
    p.signal(signal.SIGSTOP)
    asked = asyncio.create_task(ask(d.url, body))
    await asyncio.sleep(0.7)
    p.signal(signal.SIGCONT)
    answer = await asked
    assert answer.body["usage"]["kv_transfer"]["state_bytes"] > 0
    return answer.token_ids


async def release(params: dict[str, Any]) -> None:
    """As a decode node that has read what it wanted."""
    address = f"{params['remote_host']}:{params['remote_port']}"
    client = ControlClient(address, token=None, caller_engine_id="the test", timeout_s=10.0)
    async with client as control:
        await control.release(
            params["remote_engine_id"], params["remote_request_id"], reason="read"
        )


async def until_waiting(node: NodeServer) -> None:
    await until(lambda: node.engine.core.scheduler.num_waiting == 1)


async def until_loading(node: NodeServer) -> None:
    await until(lambda: len(node.engine.core.scheduler.loads) == 1)
