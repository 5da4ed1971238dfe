"""A hit never changes a token: the same requests with prefix caching on and off."""

import asyncio
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.types import GenerateRequest, SamplingParams
from serving.node.server import NodeServer
from tests.support.nodes.cluster import CONTEXT, Cluster, Generation, generate, settled
from tests.tiers import everyday

FAMILIES = (
    "qwen3",
    "qwen3_5",
    "nemotron_h",
    "gemma3",
    "granitemoehybrid",
    "falcon_h1",
    "bamba",
    "lfm2",
    "kimi_linear",
)
TIGHT, ROOMY = 2 << 20, 16 << 20
PRESSED = 2  # full-length requests that fit while 32 shorter ones ask
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


def request_of(
    prompt: tuple[int, ...], salt: str | None = None, max_tokens: int = 10
) -> GenerateRequest:
    sampling = replace(GREEDY, max_tokens=max_tokens)
    return GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=sampling, cache_salt=salt
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


def room_for(model: Path, num_requests: int) -> int:
    """Bytes of an arena that holds so many requests of full length."""
    plan = plan_arena(read_config(model).groups, 16, ROOMY)
    return plan.unit_bytes * plan.units_for(CONTEXT) * num_requests


async def on_and_off(
    cluster: Cluster, model: Path, memory: int, block_size: int = 16
) -> tuple[NodeServer, NodeServer]:
    on = await cluster.start(
        "prefill",
        model,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=memory,
        block_size=block_size,
        hash_block_size=16,
    )
    return on, await cluster.start("prefill", model)


# Every day both memories, all kinds of groups, and states with and without a recurrence; the
# families that are left out have the same.
@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5", "gemma3", "lfm2")))
@pytest.mark.parametrize("memory", [ROOMY, TIGHT])
async def test_one_by_one(
    shared: Cluster, checkpoints: dict[str, Path], family: str, memory: int
) -> None:
    on, off = await on_and_off(shared, checkpoints[family], memory)
    hits = await hits_one_by_one(on, off)
    print(f"{family}: {len(hits)} of 40 prompts hit")
    assert len(hits) >= (10 if memory > TIGHT else 3)


async def hits_one_by_one(on: NodeServer, off: NodeServer) -> list[int]:
    """Asks both nodes the same; the tokens of each hit."""
    hits = []
    answered: tuple[int, ...] = ()
    for number, prompt in enumerate(conversation_prompts(Random(5), 40)):
        asked = (*answered, *prompt)[:380] if number % 3 == 0 else prompt
        cached = await generate(on, request_of(asked))
        assert_same(cached, await generate(off, request_of(asked)))
        hits.append(cached.last.num_cached_tokens)
        answered = (*asked, *cached.token_ids)
    return [hit for hit in hits if hit]


@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5", "gemma3")))
async def test_hash_blocks_inside_blocks(
    cluster: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    """Blocks of 64 tokens, of which a hit may begin with a part: a whole number of hash blocks."""
    on, off = await on_and_off(cluster, checkpoints[family], ROOMY, block_size=64)
    hits = await hits_one_by_one(on, off)
    inside = [hit for hit in hits if hit % 64 and not hit % 16]
    print(f"{family}: {len(hits)} of 40 prompts hit, {len(inside)} inside a block")
    assert len(hits) >= 10
    assert inside


@pytest.mark.parametrize("family", everyday(FAMILIES, ("nemotron_h", "gemma3")))
async def test_all_at_once_under_pressure(
    cluster: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    on, off = await on_and_off(cluster, checkpoints[family], room_for(checkpoints[family], PRESSED))
    prompts = conversation_prompts(Random(9), 32)
    requests = [request_of(prompt, max_tokens=64) for prompt in prompts]
    cached, plain = [
        await asyncio.gather(*(generate(node, request) for request in requests))
        for node in (on, off)
    ]
    ties = sum(map(assert_same, cached, plain))
    preempted = on.engine.core.scheduler.stats.num_preemptions
    print(f"{family}: {preempted} preemptions, {ties} near-ties")
    assert preempted
    await settled(on)


async def test_salts_share_nothing(shared: Cluster, model: Path) -> None:
    on, _ = await on_and_off(shared, model, ROOMY)
    prompt = conversation_prompts(Random(1), 1)[0] * 4
    hits = []
    for salt in ("a", "b", None, "a"):
        hits.append((await generate(on, request_of(prompt, salt))).last.num_cached_tokens)
    assert hits[:3] == [0, 0, 0]
    assert hits[3] > 0
