"""Prefix caching between two nodes: only what D lacks is pulled, and no token changes."""

import asyncio
from pathlib import Path
from random import Random

import msgspec
import pytest

from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.e2e.test_prefix_cache import (
    PRESSED,
    assert_same,
    conversation_prompts,
    request_of,
    room_for,
)
from tests.support.nodes.cluster import Cluster, Generation, generate, settled, transfer_config
from tests.support.nodes.pairs import moved
from tests.tiers import everyday

HYBRIDS = ("qwen3_5", "nemotron_h", "granitemoehybrid", "falcon_h1", "kimi_linear")
REMOTE_DECODE = KVTransferParams(do_remote_decode=True)


async def hand_over(
    p: NodeServer, d: NodeServer, prompt: tuple[int, ...], max_tokens: int = 10
) -> Generation:
    asked = request_of(prompt, max_tokens=max_tokens)
    asked = msgspec.structs.replace(asked, kv_transfer_params=REMOTE_DECODE)
    done = await generate(p, asked)
    params = done.last.kv_transfer_params
    assert params is not None
    return await generate(d, msgspec.structs.replace(asked, kv_transfer_params=params))


def prompt_of(length: int, seed: int = 3) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(2, 510) for _ in range(length))


@pytest.mark.parametrize("family", everyday(HYBRIDS, ("qwen3_5", "nemotron_h")))
async def test_an_identical_second_request_pulls_nothing(
    shared: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    p, d = await shared.pair(checkpoints[family], enable_prefix_caching=True)
    for length in (16, 40, 64, 100):
        prompt = prompt_of(length, seed=length)
        first, second = [await hand_over(p, d, prompt) for _ in range(2)]
        assert moved(first).attention_bytes > 0 < moved(first).state_bytes
        assert (moved(second).attention_bytes, moved(second).state_bytes) == (0, 0)
        assert moved(second).decode_cached_tokens == length
        assert_same(second, first)
        await settled(p)


@pytest.mark.parametrize("family", everyday(HYBRIDS, ("qwen3_5", "nemotron_h")))
async def test_the_attention_prefix_on_d_survives_and_only_the_tail_moves(
    shared: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    p, d = await shared.pair(checkpoints[family], enable_prefix_caching=True)
    prompt = prompt_of(100)
    whole = await hand_over(p, d, prompt)
    longer = await hand_over(p, d, (*prompt[:90], *prompt_of(20, seed=8)))
    assert moved(longer).decode_cached_tokens == 80
    per_block = moved(whole).attention_bytes // 7
    assert moved(longer).attention_bytes == 2 * per_block
    assert moved(longer).state_bytes == moved(whole).state_bytes


@pytest.mark.parametrize("family", everyday(HYBRIDS, ("granitemoehybrid",)))
async def test_random_hand_overs_equal_one_node_without_caching(
    shared: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    p, d = await shared.pair(
        checkpoints[family], enable_prefix_caching=True, d={"kv_cache_memory_bytes": 1 << 20}
    )
    alone = await shared.start("prefill", checkpoints[family])
    prompts = conversation_prompts(Random(4), 30)
    pairs = await asyncio.gather(*(hand_over(p, d, prompt) for prompt in prompts))
    ties = 0
    for prompt, pair in zip(prompts, pairs, strict=True):
        ties += assert_same(pair, await generate(alone, request_of(prompt)))
    print(f"{family}: {ties} near-ties")


@pytest.mark.parametrize("family", everyday(HYBRIDS, ("falcon_h1",)))
async def test_hand_overs_under_pressure_equal_one_node_without_caching(
    cluster: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    """D has room for two full-length requests while 32 decode there: it preempts and recomputes."""
    model = checkpoints[family]
    p, d = await cluster.pair(
        model, enable_prefix_caching=True, d={"kv_cache_memory_bytes": room_for(model, PRESSED)}
    )
    alone = await cluster.start("prefill", model)
    prompts = conversation_prompts(Random(9), 32)
    pairs, plain = [
        await asyncio.gather(*asked)
        for asked in (
            [hand_over(p, d, prompt, max_tokens=64) for prompt in prompts],
            [generate(alone, request_of(prompt, max_tokens=64)) for prompt in prompts],
        )
    ]
    ties = sum(map(assert_same, pairs, plain))
    preempted = d.engine.core.scheduler.stats.num_preemptions
    print(f"{family}: {preempted} preemptions on D, {ties} near-ties")
    assert preempted
    await settled(p)
    await settled(d)


async def test_local_and_remote_requests_meet_on_one_node(shared: Cluster, model: Path) -> None:
    """The skip belongs to a request: on D, in the same batch, local ones keep every Mamba rule."""
    p, d = await shared.pair(model, enable_prefix_caching=True)
    alone = await shared.start("prefill", model)
    prompt = prompt_of(100)
    await hand_over(p, d, prompt)
    tails = [(*prompt[:96], *prompt_of(9, seed)) for seed in range(6)]
    jobs = [
        hand_over(p, d, tail) if seed % 2 else generate(d, request_of(tail))
        for seed, tail in enumerate(tails)
    ]
    for tail, done in zip(tails, await asyncio.gather(*jobs), strict=True):
        assert_same(done, await generate(alone, request_of(tail)))


async def test_a_failed_pull_falls_to_the_longest_prefix_of_all_groups(
    cluster: Cluster, model: Path
) -> None:
    config = transfer_config(lease_s=0.3)
    p = await cluster.start("prefill", model, enable_prefix_caching=True, kv_transfer_config=config)
    d = await cluster.start("decode", model, enable_prefix_caching=True)
    prompt = prompt_of(100)
    local = await generate(d, request_of(prompt))
    longer = (*prompt, *prompt_of(30, seed=8))
    asked = msgspec.structs.replace(request_of(longer), kv_transfer_params=REMOTE_DECODE)
    params = (await generate(p, asked)).last.kv_transfer_params
    await p.close()
    done = await generate(d, msgspec.structs.replace(asked, kv_transfer_params=params))
    assert done.last.num_cached_tokens == 96
    assert local.last.num_cached_tokens == 0


async def test_what_lies_before_a_window_was_not_pulled_and_is_not_found(
    shared: Cluster, checkpoints: dict[str, Path]
) -> None:
    p, d = await shared.pair(checkpoints["gemma3"], enable_prefix_caching=True)
    prompt = prompt_of(160)
    await hand_over(p, d, prompt)
    shorter = request_of(prompt[:70])  # its window lies before that of the prompt
    assert_same(await generate(d, shorter), await generate(p, shorter))
    await settled(p)
    await settled(d)
