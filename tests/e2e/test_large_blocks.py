"""Blocks of any size give the tokens of small ones; one block per unit is upstream's layout."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.types import GenerateRequest
from tests.e2e.test_prefix_cache import assert_same, conversation_prompts, request_of
from tests.e2e.test_prefix_cache_pd import hand_over, prompt_of
from tests.support.nodes.cluster import Cluster, generate, with_context
from tests.support.nodes.pairs import moved
from tests.tiers import everyday, l_shape

CONTEXT = 800
FAMILIES = ("qwen3_5", "nemotron_h")
INFLATED = 528
FIRST = prompt_of(600)
BRANCHES = [(*FIRST[:560], *prompt_of(40, seed)) for seed in (8, 9)]
# A follow-up starts where the first answer ended. The first branch finds attention up to where it
# leaves, in hash blocks of 16 tokens whatever the blocks are, and keeps its state there for the
# next one.
HITS = [0, 609, 0, 560]


@pytest.fixture
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return with_context(checkpoints[request.param], tmp_path / "model", CONTEXT)


def prompts_behind(answer: list[int]) -> list[tuple[int, ...]]:
    """The first prompt, a follow-up to its answer, and two prompts that leave it on the way."""
    return [FIRST, (*FIRST, *answer, *prompt_of(30, seed=7)), *BRANCHES]


@pytest.mark.parametrize(
    ("model", "block_size"),
    l_shape(FAMILIES, (16, 64, INFLATED), corner=("nemotron_h", INFLATED)),
    indirect=["model"],
)
async def test_one_node(cluster: Cluster, model: Path, block_size: int) -> None:
    on = await cluster.start("prefill", model, enable_prefix_caching=True, block_size=block_size)
    off = await cluster.start("prefill", model)
    first = await generate(off, request_of(FIRST))
    hits = []
    for prompt in prompts_behind(first.token_ids):
        cached = await generate(on, request_of(prompt))
        assert_same(cached, await generate(off, request_of(prompt)))
        hits.append(cached.last.num_cached_tokens)
    assert hits == HITS


@pytest.mark.parametrize(
    ("model", "block_size"),
    l_shape(FAMILIES, (64, INFLATED), corner=("qwen3_5", INFLATED)),
    indirect=["model"],
)
async def test_two_nodes(cluster: Cluster, model: Path, block_size: int) -> None:
    p, d = await cluster.pair(model, enable_prefix_caching=True, block_size=block_size)
    off = await cluster.start("prefill", model)
    first = await generate(off, request_of(FIRST))
    found = []
    for prompt in prompts_behind(first.token_ids):
        pair = await hand_over(p, d, prompt)
        assert_same(pair, await generate(off, request_of(prompt)))
        found.append(moved(pair).decode_cached_tokens)
    branch = 560 // block_size * block_size
    assert found == [0, 609 // block_size * block_size, branch, branch]  # whole blocks are pulled
    again = await hand_over(p, d, FIRST)
    assert (moved(again).attention_bytes, moved(again).state_bytes) == (0, 0)


@pytest.mark.parametrize("model", everyday(FAMILIES, ("nemotron_h",)), indirect=True)
async def test_many_at_once_with_one_block_per_unit(cluster: Cluster, model: Path) -> None:
    """Twelve requests that need two units each, in room for five."""
    plan = plan_arena(read_config(model).groups, INFLATED, 1 << 30)
    assert plan.blocks_per_unit == (1, 1)
    on = await cluster.start(
        "prefill",
        model,
        enable_prefix_caching=True,
        block_size=INFLATED,
        kv_cache_memory_bytes=10 * plan.unit_bytes,
    )
    off = await cluster.start("prefill", model)
    requests: list[GenerateRequest] = [
        request_of(prompt) for prompt in conversation_prompts(Random(3), 12)
    ]
    together = await asyncio.gather(*(generate(on, request) for request in requests))
    for request, cached in zip(requests, together, strict=True):
        assert_same(cached, await generate(off, request))
