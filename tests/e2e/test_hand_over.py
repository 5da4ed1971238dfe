"""Prefill on P, decode on D: exactly the tokens and log-probabilities of one node."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import KVLoadError, KVTransferParamsError
from tests.support.nodes.cluster import (
    Cluster,
    all_back,
    generate,
    settled,
    transfer_config,
    until,
)
from tests.support.nodes.hand_over_checks import (
    CHANGES,
    cancel_behind_the_first_token,
    check_eight_at_once,
    check_one_token_moves_nothing,
    check_recompute,
    check_refused,
    check_tokens_and_logprobs,
)
from tests.support.nodes.leaks import excess, held_here
from tests.support.nodes.pairs import (
    FAMILIES,
    GREEDY,
    REMOTE_DECODE,
    TRANSPORTS,
    arena_for,
    end_hold,
    hand_over,
    prefill,
    prompt_of,
    request_of,
)
from tests.tiers import l_shape

EACH_FAMILY_AND_TRANSPORT = pytest.mark.parametrize(
    ("family", "transport"), l_shape((*FAMILIES, "lfm2"), TRANSPORTS, corner=("qwen3_5", "shm"))
)


@EACH_FAMILY_AND_TRANSPORT
async def test_tokens_and_logprobs_are_bit_equal_to_one_node(
    shared: Cluster, checkpoints: dict[str, Path], family: str, transport: str
) -> None:
    p, d = await shared.pair(checkpoints[family], transfer_config(transport))
    await check_tokens_and_logprobs(p, d)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_a_pair_in_int8_is_bit_equal_to_one_node(
    shared: Cluster, model: Path, kernels: str
) -> None:
    p, d = await shared.pair(model, quantization="int8", kernels=kernels)
    await check_tokens_and_logprobs(p, d, (17, 200))


async def test_the_first_token_may_be_the_last_and_then_nothing_is_pulled(
    shared: Cluster, model: Path
) -> None:
    p, d = await shared.pair(model)
    await check_one_token_moves_nothing(p, d)
    await settled(p)


async def test_a_killed_prefill_node_costs_a_recompute_and_no_token(
    cluster: Cluster, model: Path
) -> None:
    p, d = await cluster.pair(model)
    prompt = prompt_of(100)
    params = await prefill(p, prompt)
    await p.close()
    await check_recompute(d, prompt, params)


async def test_policy_fail_turns_an_unreachable_peer_into_an_error(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    config = transfer_config(policy="fail")
    p, d = await cluster.pair(checkpoints["qwen3"], d={"kv_transfer_config": config})
    params = await prefill(p, prompt_of(30))
    await p.close()
    with pytest.raises(KVLoadError, match="cannot be loaded"):
        await generate(d, request_of(prompt_of(30), GREEDY, params))


async def test_a_lease_that_nobody_claims_ends_and_gives_its_memory_back(
    shared: Cluster, model: Path
) -> None:
    config = transfer_config(lease_s=0.3)
    p = await shared.start("prefill", model, kv_transfer_config=config)
    params = await prefill(p, prompt_of(30))
    assert p.engine.core.scheduler.num_held == 1
    await settled(p)
    d = await shared.start("decode", model)
    late = await generate(d, request_of(prompt_of(30), GREEDY, params))
    assert late.token_ids == (await generate(p, request_of(prompt_of(30)))).token_ids
    assert not late.last.was_pulled


@pytest.mark.parametrize("busy_s", [0.0, 0.3])
async def test_a_lease_is_renewed_while_its_request_waits(
    shared: Cluster, model: Path, busy_s: float
) -> None:
    """As often as P's lease needs, whatever D would grant; D is full for two leases of P's.

    Also where the event loop is busy for half of a lease at a time.
    """
    p = await shared.start("prefill", model, kv_transfer_config=transfer_config(lease_s=0.6))
    d = await shared.start(
        "decode",
        model,
        kv_transfer_config=transfer_config(lease_s=600.0),
        kv_cache_memory_bytes=arena_for(model, 100),
    )
    await hand_over(p, d, prompt_of(20))  # the two have met
    held = await prefill(d, prompt_of(80))
    waiting = asyncio.create_task(hand_over(p, d, prompt_of(50)))
    await until(lambda: d.engine.core.scheduler.num_waiting == 1)
    for _ in range(3):
        await asyncio.sleep(0.25)
        time.sleep(busy_s)  # noqa: ASYNC251 - nothing else may run
    assert not waiting.done()
    await end_hold(d, held)
    assert (await waiting).last.was_pulled


async def test_an_answer_of_p_that_nobody_takes_ends_its_lease(
    shared: Cluster, model: Path
) -> None:
    p = await shared.start("prefill", model)
    request = request_of(prompt_of(40), GREEDY, REMOTE_DECODE)
    asked = asyncio.ensure_future(anext(p.engine.generate(request)))
    await asyncio.sleep(0)
    while not p.engine.core.scheduler.num_held:
        time.sleep(0.01)  # noqa: ASYNC251 - the loop must not deliver what the engine has finished
    asked.cancel()
    await settled(p)
    stream = p.engine.generate(request)
    assert (await anext(stream)).kv_transfer_params is not None
    await stream.aclose()
    await settled(p)


async def test_cancelled_requests_leave_nothing_on_either_node(
    shared: Cluster, model: Path
) -> None:
    p, d = await shared.pair(model)
    await cancel_behind_the_first_token(p, d)
    await settled(d)
    await settled(p)


@pytest.mark.parametrize(("change", "code"), CHANGES)
async def test_changed_parameters_are_refused_and_nothing_leaks(
    shared: Cluster, checkpoints: dict[str, Path], change: dict[str, object], code: str
) -> None:
    config = transfer_config(lease_s=0.3)
    p = await shared.start("prefill", checkpoints["qwen3"], kv_transfer_config=config)
    params = await prefill(p, prompt_of(30))
    await check_refused(p, msgspec.structs.replace(params, **change), code)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "bfloat16"}, r"bfloat16' here and .* float32' there"),
        ({"quantization": "int8"}, r"weight_quantization is 'int8' here and 'None' there"),
    ],
)
async def test_nodes_that_compute_or_keep_different_types_do_not_exchange_them(
    shared: Cluster, checkpoints: dict[str, Path], change: dict[str, Any], told: str
) -> None:
    """And P has its memory back at once, not when the lease runs out."""
    p = await shared.start("prefill", checkpoints["qwen3"])
    config = transfer_config(policy="fail")
    d = await shared.start("decode", checkpoints["qwen3"], kv_transfer_config=config, **change)
    params = await prefill(p, prompt_of(30))
    with pytest.raises(KVLoadError, match=told):
        await generate(d, request_of(prompt_of(30), GREEDY, params))
    await settled(p)


async def test_the_arena_of_a_dead_peer_does_not_stay_mapped(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    p = await cluster.start("prefill", checkpoints["qwen3"])
    config = transfer_config(lease_s=0.6)
    d = await cluster.start("decode", checkpoints["qwen3"], kv_transfer_config=config)
    before = held_here()
    await hand_over(p, d, prompt_of(30))
    # Of P's arena, of its lease records and of its nonce.
    assert excess(before, held_here())["mapping /memfd:tandem-arena"] == 3
    await p.close()
    cluster.nodes.remove(p)
    del p
    before["mapping /memfd:tandem-arena"] -= 3
    # P had two; D has one more to talk to peers, to read and to ask. On a busy machine the loop's
    # own pool starts another.
    before["thread"] += 2
    await all_back(before)


@EACH_FAMILY_AND_TRANSPORT
async def test_eight_at_once_agree_with_one_at_a_time(
    shared: Cluster,
    checkpoints: dict[str, Path],
    record_property: Callable[[str, object], None],
    family: str,
    transport: str,
) -> None:
    p, d = await shared.pair(checkpoints[family], transfer_config(transport))
    record_property("near-ties", await check_eight_at_once(p, d))


@pytest.mark.parametrize(
    "change", [{"cache_salt": "theirs"}, {"prompt_token_ids": prompt_of(31)[1:]}]
)
async def test_another_prompt_or_salt_is_refused_and_the_right_one_still_taken(
    shared: Cluster, model: Path, change: dict[str, object]
) -> None:
    p, d = await shared.pair(model)
    asked = msgspec.structs.replace(request_of(prompt_of(30)), cache_salt="ours")
    decode_there = msgspec.structs.replace(asked, kv_transfer_params=REMOTE_DECODE)
    params = (await generate(p, decode_there)).last.kv_transfer_params
    asked = msgspec.structs.replace(asked, kv_transfer_params=params)
    with pytest.raises(KVTransferParamsError, match="or under another cache_salt") as caught:
        await generate(d, msgspec.structs.replace(asked, **change))
    assert caught.value.code == "mismatched_kv_transfer_params"
    assert (await generate(d, asked)).last.was_pulled
    await settled(d)
    await settled(p)
