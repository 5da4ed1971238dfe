"""A prefill node ends and another serves at its address: old promises are refused, new ones hold.

Nothing but the incarnation tells the two apart: name, host, port and request ids are the same.
"""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.errors import KVLoadError
from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import HeldPull, recomputed
from tests.support.nodes.accounts import Account, at_rest, forget_peers
from tests.support.nodes.asking import remote_prefill
from tests.support.nodes.cluster import Cluster, generate, settled, transfer_config
from tests.support.nodes.pairs import GREEDY, hand_over, prefill, prompt_of, request_of
from tests.support.nodes.processes import Launcher, free_port, transport_flag
from tests.tiers import everyday, l_shape

FAMILY = "qwen3_5"
PROMPT = prompt_of(100, salt=4)


async def replace(
    cluster: Cluster, old: NodeServer, model: Path, port: int, **changes: Any
) -> NodeServer:
    """Ends `old` and starts another node at its address."""
    await old.close()
    cluster.nodes.remove(old)
    return await cluster.start("prefill", model, grpc_port=port, **changes)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_promises_of_the_old_incarnation_are_refused_and_those_of_the_new_one_hold(
    cluster: Cluster, model: Path, policy: str
) -> None:
    """Both have a request of the same name; D was connected to the old one, or never was.

    Who never was hears it from the handshake; who was reads, and hears that nobody vouches for it.
    Either can compute the prompt.
    """
    port = free_port()
    config = transfer_config(policy=policy)
    p = await cluster.start("prefill", model, grpc_port=port)
    known, fresh = [
        await cluster.start("decode", model, kv_transfer_config=config) for _ in range(2)
    ]
    alone = await generate(known, request_of(PROMPT))
    await hand_over(p, known, PROMPT)
    account = await Account.open(known, fresh)
    old = [await prefill(p, PROMPT) for _ in range(2)]
    p = await replace(cluster, p, model, port)
    await generate(p, request_of(PROMPT))
    new = await prefill(p, PROMPT)
    assert new.remote_request_id == old[0].remote_request_id == "r-2"
    for d, params, cause, error in (
        (fresh, old[1], "foreign", "that node is gone"),
        (known, old[0], "late_read", "late_read"),
    ):
        asked = generate(d, request_of(PROMPT, GREEDY, params))
        if policy == "fail":
            with pytest.raises(KVLoadError, match=error):
                await asked
            continue
        pair = await asked
        assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
        assert not pair.last.was_pulled
        assert recomputed(d) == {cause: len(PROMPT)}
    for d, params in ((known, new), (fresh, await prefill(p, PROMPT))):
        pair = await generate(d, request_of(PROMPT, GREEDY, params))
        assert pair.last.was_pulled
        assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    forget_peers(fresh)
    await account.close()


GEOMETRIES = {
    "dtype": ({"dtype": "bfloat16"}, "128 float32, .* here and .*128 bfloat16, .* there"),
    "seed": ({"prefix_hash_seed": "another"}, "prefix_hash_seed is '.*' here and '.*' there"),
}


@pytest.mark.parametrize("change", [*GEOMETRIES, "model"])
async def test_a_restart_with_another_geometry_is_refused_with_both_values(
    cluster: Cluster, checkpoints: dict[str, Path], change: str
) -> None:
    """Not even P's first token counts, and P has its memory back at once."""
    model, port = checkpoints[FAMILY], free_port()
    other = checkpoints["qwen3"] if change == "model" else model
    changes, message = GEOMETRIES.get(change, ({}, "is '.*' here and '.*' there"))
    p = await cluster.start("prefill", model, grpc_port=port)
    d, strict = [
        await cluster.start(
            "decode", model, kv_transfer_config=transfer_config(policy=policy, lease_s=0.6)
        )
        for policy in ("recompute", "fail")
    ]
    alone = await generate(d, request_of(PROMPT))
    for node in (d, strict):
        await hand_over(p, node, PROMPT)
    p = await replace(cluster, p, other, port, **changes)
    account = await Account.open(d, strict, p)
    pair = await hand_over(p, d, PROMPT)
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert not pair.last.was_pulled
    await settled(p)
    with pytest.raises(KVLoadError, match=message):
        await hand_over(p, strict, PROMPT)
    await account.close()


# --- with a read under way -----------------------------------------------------------------------
# Over shm the memory of the old one outlives it as it was: if it has vouched for its bytes before,
# they and the record of its lease are still right.


@pytest.mark.parametrize(
    ("transport", "point"),
    l_shape(
        *(("shm", "zmq"), (FaultPoint.AFTER_READ, FaultPoint.BEFORE_CONFIRM)),
        corner=("zmq", FaultPoint.BEFORE_CONFIRM),
    ),
    ids=str,
)
async def test_the_new_incarnation_does_not_vouch_for_a_read_from_the_old_one(
    cluster: Cluster, model: Path, transport: str, point: FaultPoint
) -> None:
    """It holds a prefill of the same name."""
    port, faults = free_port(), HeldPull(point)
    config = transfer_config(transport)
    p = await cluster.start("prefill", model, grpc_port=port, kv_transfer_config=config)
    d = await cluster.start("decode", model, faults=faults, kv_transfer_config=config)
    alone = await generate(d, request_of(PROMPT))
    params = await prefill(p, PROMPT)
    asked = asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, params)))
    assert await asyncio.to_thread(faults.reached.wait, 20)
    p = await replace(cluster, p, model, port, kv_transfer_config=config)
    new = await prefill(p, PROMPT)
    assert new.remote_request_id == params.remote_request_id
    faults.go.set()
    pair = await asked
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert transport == "shm" or not pair.last.was_pulled
    again = await generate(d, request_of(PROMPT, GREEDY, new))
    assert again.last.was_pulled
    await at_rest(p)
    await at_rest(d)


@pytest.mark.parametrize("transport", everyday(("shm", "nixl"), ("nixl",)))
async def test_a_killed_process_and_the_next_one_on_its_ports(
    cluster: Cluster, real: Launcher, transport: str
) -> None:
    """The old one dies in the middle of a read; the new one is there before it is confirmed."""
    ports = "--grpc-port", str(free_port())
    flags = *ports, *transport_flag(transport)
    faults = HeldPull(FaultPoint.AFTER_READ)
    config = transfer_config(transport, control_s=30.0)
    p = real.node("prefill_node", *flags, UCX_TLS="tcp")
    d = await cluster.start("decode", real.model, faults=faults, kv_transfer_config=config)
    alone = await generate(d, request_of(PROMPT))
    asked = asyncio.create_task(
        generate(d, request_of(PROMPT, GREEDY, await remote_prefill(p.url, PROMPT)))
    )
    assert await asyncio.to_thread(faults.reached.wait, 20)
    p.kill()
    assert p.process.returncode == -signal.SIGKILL
    p = real.node("prefill_node", *flags, UCX_TLS="tcp")
    new = await remote_prefill(p.url, PROMPT)
    faults.go.set()
    pair = await asked
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert transport == "shm" or not pair.last.was_pulled
    again = await generate(d, request_of(PROMPT, GREEDY, new))
    assert again.last.was_pulled
    assert again.token_ids == alone.token_ids
    await at_rest(d)
    await asyncio.to_thread(p.assert_at_rest)
