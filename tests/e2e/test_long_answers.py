"""Rounding after a hit stays rounding: 500 tokens decoded from cached blocks and states."""

from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.test_prefix_cache import assert_same, request_of
from tests.e2e.test_prefix_cache_pd import hand_over, prompt_of
from tests.support.nodes.cluster import Cluster, Generation, generate, with_context
from tests.support.nodes.pairs import moved
from tests.tiers import everyday

CONTEXT = 700
ANSWER = 500
WINDOW = 100
# What float32 loses between two orders of addition; measured: 5e-7 on average, anywhere.
ROUNDING = 1e-6
FIRST = prompt_of(90)
TAIL = prompt_of(40, seed=8)


def assert_no_growth(cached: Generation, alone: Generation) -> None:
    """The same tokens, and as close at the end as at the beginning; up to a turned near-tie."""
    assert_same(cached, alone)
    pairs = zip(cached.logprobs, alone.logprobs, strict=True)
    equal = [mine.token_id == other.token_id for mine, other in pairs]
    compared = equal.index(False) if False in equal else ANSWER
    assert compared >= 3 * WINDOW, "a near-tie turned early: choose another prompt"
    pairs = zip(cached.logprobs[:compared], alone.logprobs[:compared], strict=True)
    differences = [abs(mine.logprob - other.logprob) for mine, other in pairs]
    early, late = mean(differences[:WINDOW]), mean(differences[-WINDOW:])
    assert late < 4 * max(early, ROUNDING), (early, late)


@pytest.mark.parametrize("family", everyday(("qwen3_5", "nemotron_h"), ("nemotron_h",)))
async def test_one_node(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """The hit is a state, six shared blocks and a copy of a seventh."""
    model = with_context(checkpoints[family], tmp_path / "model", CONTEXT)
    on = await cluster.start("prefill", model, enable_prefix_caching=True)
    off = await cluster.start("prefill", model)
    first = await generate(on, request_of(FIRST))
    asked = request_of((*FIRST, *first.token_ids, *TAIL), max_tokens=ANSWER)
    cached = await generate(on, asked)
    assert cached.last.num_cached_tokens == len(FIRST) + 9
    assert_no_growth(cached, await generate(off, asked))


@pytest.mark.parametrize("family", ["qwen3_5"])
async def test_two_nodes(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """P goes on from its own state, D from its own blocks and P's state."""
    model = with_context(checkpoints[family], tmp_path / "model", CONTEXT)
    p, d = await cluster.pair(model, enable_prefix_caching=True)
    alone = await cluster.start("prefill", model)
    first = await hand_over(p, d, FIRST)
    prompt = (*FIRST, *first.token_ids, *TAIL)
    pair = await hand_over(p, d, prompt, max_tokens=ANSWER)
    assert moved(pair).prefill_cached_tokens == len(FIRST)
    assert moved(pair).decode_cached_tokens == (len(FIRST) + 9) // 16 * 16
    assert_no_growth(pair, await generate(alone, request_of(prompt, max_tokens=ANSWER)))
