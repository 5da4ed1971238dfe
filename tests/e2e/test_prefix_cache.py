"""A hit never changes a token: the same requests with prefix caching on and off."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from engine.node.server import NodeServer
from engine.types import GenerateRequest, SamplingParams
from tests.cluster import Cluster, Generation, generate, settled

FAMILIES = ("qwen3", "qwen3_5", "nemotron_h")
LOGPROB_TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=2, ignore_eos=True)


def conversation_prompts(rng: Random, count: int) -> list[tuple[int, ...]]:
    """Prompts that share, extend, and leave earlier ones at any token."""
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        base = rng.choice(made) if made and rng.random() < 0.8 else ()
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.5 else base
        made.append((*kept, *(rng.randrange(2, 510) for _ in range(rng.randint(1, 90))))[:380])
    return made


def request_of(prompt: tuple[int, ...], salt: str | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=GREEDY, cache_salt=salt
    )


def assert_same(on: Generation, off: Generation) -> int:
    """Equal up to rounding; returns the near-ties, where rounding may choose the token."""
    for place, (mine, other) in enumerate(zip(on.logprobs, off.logprobs, strict=True)):
        assert mine.top is not None and other.top is not None
        margin = other.top[0][1] - other.top[1][1]
        if mine.token_id != other.token_id:
            assert margin < LOGPROB_TOLERANCE, (place, margin)
            return 1
        assert abs(mine.logprob - other.logprob) < LOGPROB_TOLERANCE, place
    assert on.token_ids == off.token_ids
    return 0


async def pair_of_nodes(
    cluster: Cluster, model: Path, memory: int
) -> tuple[NodeServer, NodeServer]:
    on = await cluster.start(
        "prefill", model, enable_prefix_caching=True, kv_cache_memory_bytes=memory
    )
    return on, await cluster.start("prefill", model)


@pytest.mark.parametrize("memory", [16 << 20, 1 << 20], ids=["roomy", "tight"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_one_by_one(
    cluster: Cluster, checkpoints: dict[str, Path], family: str, memory: int
) -> None:
    on, off = await pair_of_nodes(cluster, checkpoints[family], memory)
    ties = hits = 0
    for prompt in conversation_prompts(Random(5), 40):
        cached = await generate(on, request_of(prompt))
        ties += assert_same(cached, await generate(off, request_of(prompt)))
        hits += cached.last.num_cached_tokens > 0
    print(f"{family}: {hits} of 40 prompts hit, {ties} near-ties")
    assert hits >= (10 if memory > 1 << 20 else 3)


@pytest.mark.parametrize("family", FAMILIES)
async def test_all_at_once_under_pressure(
    cluster: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    on, off = await pair_of_nodes(cluster, checkpoints[family], 1 << 20)
    prompts = conversation_prompts(Random(9), 32)
    several = await asyncio.gather(*(generate(on, request_of(prompt)) for prompt in prompts))
    ties = 0
    for prompt, cached in zip(prompts, several, strict=True):
        ties += assert_same(cached, await generate(off, request_of(prompt)))
    preempted = on.engine.core.scheduler.stats.num_preemptions
    print(f"{family}: {preempted} preemptions, {ties} near-ties")
    await settled(on)


async def test_salts_share_nothing(cluster: Cluster, checkpoints: dict[str, Path]) -> None:
    on, _ = await pair_of_nodes(cluster, checkpoints["qwen3_5"], 16 << 20)
    prompt = conversation_prompts(Random(1), 1)[0] * 4
    hits = []
    for salt in ("a", "b", None, "a"):
        hits.append((await generate(on, request_of(prompt, salt))).last.num_cached_tokens)
    assert hits[:3] == [0, 0, 0]
    assert hits[3] > 0
