"""A turn before that cannot be pulled costs time and no token, and nobody keeps it any longer."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import HeldPull, counted
from tests.support.nodes.accounts import at_rest
from tests.support.nodes.cluster import Cluster, Generation, generate, settled
from tests.support.nodes.pairs import (
    GREEDY,
    assert_equal,
    count_near_ties,
    end_hold,
    prompt_of,
    request_of,
)
from tests.support.nodes.turns import (
    Turn,
    both_ways,
    first_turn,
    forget,
    next_prompt,
    pair_of_nodes,
    skipped,
    take_turn,
)
from tests.tiers import l_shape

FAMILY = "qwen3_5"
FAILURES = "tandem:kv_verification_failures"
RETRIES = "tandem:kv_verification_retries"
HYBRIDS = ("qwen3_5", "nemotron_h")


nodes = partial(pair_of_nodes, d_caches=False)


async def alone(cluster: Cluster, model: Path, prompt: tuple[int, ...]) -> Generation:
    """The answer of one node that knows nothing."""
    one = await cluster.start("decode", model, enable_prefix_caching=True)
    return await generate(one, request_of(prompt))


async def computed_here(
    p: NodeServer, d: NodeServer, prompt: tuple[int, ...], params: KVTransferParams
) -> Generation:
    """The answer of a pair whose P pulls nothing."""
    prefilled = await generate(p, request_of(prompt, GREEDY, params))
    assert not prefilled.last.was_pulled
    assert prefilled.last.num_cached_tokens == 0
    answer = prefilled.last.kv_transfer_params
    return await generate(d, request_of(prompt, GREEDY, answer))


def edited(turn: Turn) -> tuple[int, ...]:
    return (turn.prompt[0] ^ 1, *next_prompt(turn)[1:])


def retokenized(turn: Turn) -> tuple[int, ...]:
    """Only the last token that has K/V is another."""
    return (*turn.said[:-2], turn.said[-2] ^ 1, *turn.said[-1:], *prompt_of(20))


def shorter(turn: Turn) -> tuple[int, ...]:
    return turn.said[:-10]


def no_longer(turn: Turn) -> tuple[int, ...]:
    """Exactly what D has computed: there would be nothing left to sample from."""
    return turn.said[:-1]


OTHER_PROMPTS: dict[Callable[[Turn], tuple[int, ...]], str] = {
    edited: "other_tokens",
    retokenized: "other_tokens",
    shorter: "not_longer",
    no_longer: "not_longer",
}


@pytest.mark.parametrize(
    ("family", "make"),
    l_shape(HYBRIDS, OTHER_PROMPTS, corner=(FAMILY, edited)),
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_a_prompt_that_does_not_go_on_from_there_is_computed(
    shared: Cluster,
    checkpoints: dict[str, Path],
    family: str,
    make: Callable[[Turn], tuple[int, ...]],
) -> None:
    """And D keeps the turn no longer, although its time would last."""
    p, d = await nodes(shared, checkpoints[family], both_ways())
    turn = await first_turn(p, d)
    prompt = make(turn)
    prefilled = await generate(p, request_of(prompt, GREEDY, turn.kept))
    assert not prefilled.last.was_pulled
    await settled(d)
    assert skipped(p) == {OTHER_PROMPTS[make]: 1}
    decoded = await generate(d, request_of(prompt, GREEDY, prefilled.last.kv_transfer_params))
    assert_equal(decoded, await alone(shared, checkpoints[family], prompt))
    await end_hold(d, decoded.last.kv_transfer_params)


async def test_without_the_option_p_computes_and_d_keeps_it_no_longer(
    shared: Cluster, model: Path
) -> None:
    p, d = await nodes(shared, model, both_ways())
    off = await shared.start("prefill", model, kv_transfer_config=both_ways(on=False))
    turn = await first_turn(p, d)
    prompt = next_prompt(turn)
    done = await generate(off, request_of(prompt, GREEDY, turn.kept))
    await settled(d)
    assert skipped(off) == {"disabled": 1}
    await end_hold(off, done.last.kv_transfer_params)


async def test_an_expired_turn_is_computed(shared: Cluster, model: Path) -> None:
    p, d = await nodes(shared, model, both_ways(decoder_kv_blocks_ttl=0.2))
    turn = await take_turn(p, d, prompt_of(90))
    await settled(d)
    assert counted(d, "vllm:nixl_num_kv_expired_reqs") == 1
    await forget(p)
    prompt = next_prompt(turn)
    done = await computed_here(p, d, prompt, turn.kept)
    assert skipped(p) == {"expired": 1}
    assert_equal(done, await alone(shared, model, prompt))
    await at_rest(p)
    await at_rest(d)


async def test_a_turn_is_kept_for_its_time_and_once_claimed_for_as_long_as_p_needs(
    shared: Cluster, model: Path
) -> None:
    """The pull is held back for longer than the turn would have been kept unclaimed."""
    faults = HeldPull(FaultPoint.BEFORE_CONFIRM)
    config = both_ways(decoder_kv_blocks_ttl=1.0, kv_lease_duration=1.0)
    p, d = await nodes(shared, model, config, on_p=faults)
    turn = await first_turn(p, d)
    prompt = next_prompt(turn)
    asked = asyncio.create_task(take_turn(p, d, prompt, GREEDY, turn))
    assert await asyncio.to_thread(faults.reached.wait, 20)
    await asyncio.sleep(2.5)
    assert d.engine.core.scheduler.num_held == 1
    faults.go.set()
    assert (await asked).prefilled.last.was_pulled
    await settled(d)


async def test_another_incarnation_at_the_same_address_is_not_asked_for_it(
    cluster: Cluster, model: Path
) -> None:
    p, d = await nodes(cluster, model, both_ways())
    turn = await first_turn(p, d)
    await end_hold(d, turn.kept)
    await d.close()
    cluster.nodes.remove(d)
    port = turn.kept.remote_port
    again = await cluster.start("decode", model, kv_transfer_config=both_ways(), grpc_port=port)
    prompt = next_prompt(turn)
    done = await computed_here(p, again, prompt, turn.kept)
    assert skipped(p) == {"foreign": 1}
    assert_equal(done, await alone(cluster, model, prompt))
    await end_hold(again, done.last.kv_transfer_params)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_dead_node_s_turn_is_computed_whatever_the_policy(
    cluster: Cluster, model: Path, policy: str
) -> None:
    p, d = await nodes(cluster, model, both_ways(policy=policy))
    other = await cluster.start("decode", model)
    turn = await first_turn(p, d)
    await end_hold(d, turn.kept)
    await d.close()
    prompt = next_prompt(turn)
    done = await computed_here(p, other, prompt, turn.kept)
    assert skipped(p) == {"peer_unreachable": 1}
    assert_equal(done, await alone(cluster, model, prompt))


@pytest.mark.parametrize("point", [FaultPoint.BEFORE_READ, FaultPoint.BEFORE_CONFIRM])
async def test_who_leaves_while_p_pulls_leaves_nothing_on_either_node(
    shared: Cluster, model: Path, point: FaultPoint
) -> None:
    faults = HeldPull(point)
    p, d = await nodes(shared, model, both_ways(), on_p=faults)
    turn = await first_turn(p, d)
    asked = asyncio.create_task(generate(p, request_of(next_prompt(turn), GREEDY, turn.kept)))
    assert await asyncio.to_thread(faults.reached.wait, 20)
    asked.cancel()
    await settled(d)
    faults.go.set()
    await settled(p)


async def test_two_next_turns_at_once_are_both_right(shared: Cluster, model: Path) -> None:
    """One lease serves one of them for certain."""
    p, d = await nodes(shared, model, both_ways())
    one = await shared.start("decode", model, enable_prefix_caching=True)
    turn = await first_turn(p, d)
    prompts = [next_prompt(turn, salt=salt) for salt in (1, 2)]
    both = await asyncio.gather(*(take_turn(p, d, prompt, GREEDY, turn) for prompt in prompts))
    for prompt, second in zip(prompts, both, strict=True):
        expected = await generate(one, request_of(prompt))
        await forget(one)
        count_near_ties([expected], [second.decoded])
        await end_hold(d, second.kept)
    assert any(second.prefilled.last.kv_transfer for second in both)
    await settled(d)
