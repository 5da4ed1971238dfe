"""States kept while a request decodes: later requests start from them, and no token changes."""

import asyncio
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks.support.small_models import VOCABULARY
from engine.errors import ConfigError
from engine.types import KVTransferParams
from tests.e2e.test_prefix_cache import assert_same, request_of
from tests.support.nodes.cluster import CONTEXT, Cluster, Generation, generate
from tests.support.nodes.pairs import arena_for

HYBRIDS = ("qwen3_5", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "kimi_linear")
INTERVAL = 32
PROMPT = 40  # the prompt's own checkpoint lies at 32, decode boundaries at 64 and 96
OUTPUT = 60
SHARED = 70


def text_of(length: int, seed: int) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(2, VOCABULARY) for _ in range(length))


def branch_of(done: Generation, prompt: tuple[int, ...], seed: int = 2) -> tuple[int, ...]:
    """The first `SHARED` tokens of a finished request, then something else."""
    return (*(*prompt, *done.token_ids)[:SHARED], *text_of(9, seed))


NO_STATE_KEPT = [("qwen3_5", 0, 32)]


@pytest.mark.parametrize(
    ("family", "interval", "hit"), [(each, INTERVAL, 64) for each in HYBRIDS] + NO_STATE_KEPT
)
async def test_a_request_starts_from_a_state_kept_while_another_decoded(
    shared: Cluster, checkpoints: dict[str, Path], family: str, interval: int, hit: int
) -> None:
    on = await shared.start(
        "prefill",
        checkpoints[family],
        enable_prefix_caching=True,
        mamba_decode_checkpoint_interval=interval,
    )
    off = await shared.start("prefill", checkpoints[family])
    prompt = text_of(PROMPT, seed=1)
    first = await generate(on, request_of(prompt, max_tokens=OUTPUT))
    branch = request_of(branch_of(first, prompt), max_tokens=OUTPUT)
    second = await generate(on, branch)
    assert second.last.num_cached_tokens == hit
    assert_same(second, await generate(off, branch))


@pytest.mark.parametrize(("interval", "hit"), [(INTERVAL, 64), (0, PROMPT)])
async def test_a_decode_node_keeps_states_behind_what_it_pulled(
    shared: Cluster, model: Path, interval: int, hit: int
) -> None:
    p, d = await shared.pair(
        model, d={"mamba_decode_checkpoint_interval": interval}, enable_prefix_caching=True
    )
    off = await shared.start("prefill", model)
    prompt = text_of(PROMPT, seed=1)
    asked = msgspec.structs.replace(
        request_of(prompt, max_tokens=OUTPUT),
        kv_transfer_params=KVTransferParams(do_remote_decode=True),
    )
    params = (await generate(p, asked)).last.kv_transfer_params
    first = await generate(d, msgspec.structs.replace(asked, kv_transfer_params=params))
    branch = request_of(branch_of(first, prompt), max_tokens=OUTPUT)
    second = await generate(d, branch)
    assert second.last.num_cached_tokens == hit
    assert_same(second, await generate(off, branch))


async def test_states_kept_in_outputs_that_are_computed_again_are_right_too(
    cluster: Cluster, model: Path
) -> None:
    """After a preemption the output is computed in chunks, with boundaries inside of them."""
    on = await cluster.start(
        "prefill",
        model,
        enable_prefix_caching=True,
        mamba_decode_checkpoint_interval=16,
        mamba_checkpoint_share=1.0,
        kv_cache_memory_bytes=arena_for(model, CONTEXT, 3),
    )
    off = await cluster.start("prefill", model)
    prompts = [text_of(20 + 3 * seed, seed) for seed in range(12)]
    asked = [request_of(prompt, max_tokens=80) for prompt in prompts]
    firsts = await asyncio.gather(*(generate(on, request) for request in asked))
    assert on.engine.core.scheduler.stats.num_preemptions
    hits = []
    for prompt, first in reversed(list(zip(prompts, firsts, strict=True))):
        branch = request_of(branch_of(first, prompt))
        second = await generate(on, branch)
        hits.append(second.last.num_cached_tokens)
        assert_same(second, await generate(off, branch))
    assert 64 in hits, hits


@pytest.mark.parametrize(
    ("interval", "caching", "words"),
    [
        (40, True, "40 must be a multiple of an attention block, 16 tokens: 32 or 48"),
        (1, True, "16 tokens: 16"),
        (32, False, "needs prefix caching"),
    ],
)
async def test_an_interval_that_could_serve_nobody_is_refused(
    cluster: Cluster, model: Path, interval: int, caching: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await cluster.start(
            "decode",
            model,
            enable_prefix_caching=caching,
            mamba_decode_checkpoint_interval=interval,
        )
