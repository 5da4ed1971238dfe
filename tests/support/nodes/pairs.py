"""Requests to one node and to a pair of nodes, and how their answers are compared."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.support.small_models import VOCABULARY
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.types import GenerateRequest, KVTransferParams, KVTransferStats, SamplingParams
from serving.node.server import NodeServer
from tests.support.nodes.cluster import BASE, Generation, Node, generate
from tests.support.nodes.engine_thread import run_in_engine

FAMILIES = ("qwen3", "qwen3_5", "nemotron_h", "kimi_linear")
TRANSPORTS = ("shm", "nixl", "ucx", "zmq")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
REMOTE_DECODE = KVTransferParams(do_remote_decode=True)

# What float32 promises when batches, and with them the order of additions, differ.
MARGIN = 1e-4


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt without short periods."""
    return tuple((7 * i * i + 3 * i + salt) % (VOCABULARY - 2) + 2 for i in range(length))


def request_of(
    prompt: tuple[int, ...],
    sampling: SamplingParams = GREEDY,
    params: KVTransferParams | None = None,
) -> GenerateRequest:
    """All requests have one label: it must not matter."""
    return GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=sampling, kv_transfer_params=params
    )


async def prefill(
    node: Node, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY
) -> KVTransferParams:
    """P's part; what it answers for D."""
    done = await generate(node, request_of(prompt, sampling, REMOTE_DECODE))
    assert done.last.kv_transfer_params is not None
    return done.last.kv_transfer_params


async def end_hold(node: NodeServer, held: KVTransferParams | None) -> None:
    """Ends what `node` holds, as the end of its lease would: nobody may read it any more."""
    assert held is not None and held.remote_request_id is not None
    abort = partial(node.engine.core.scheduler.abort, held.remote_request_id)
    await run_in_engine(node.engine, abort)


async def hand_over(
    p: Node, d: Node, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY
) -> Generation:
    """P's part, then D's."""
    return await generate(d, request_of(prompt, sampling, await prefill(p, prompt, sampling)))


async def hand_over_all(
    p: Node, d: Node, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
) -> list[Generation]:
    """All prompts at the same time."""
    return await asyncio.gather(*(hand_over(p, d, prompt, sampling) for prompt in prompts))


def moved(done: Generation) -> KVTransferStats:
    """Statistics of the hand-over that served this answer."""
    assert done.last.kv_transfer is not None
    return done.last.kv_transfer


def assert_equal(pair: Generation, alone: Generation, *, was_pulled: bool | None = None) -> None:
    """Compares bit by bit, and checks whether D pulled it where that is given."""
    assert pair.token_ids == alone.token_ids
    assert pair.logprobs == alone.logprobs
    assert was_pulled in (None, pair.last.was_pulled)


def count_near_ties(
    alone: Sequence[Generation], together: Sequence[Generation], margin: float = MARGIN
) -> int:
    """Near-ties among the tokens compared; asserts that nothing else tells the two apart."""
    pairs = zip(alone, together, strict=True)
    return sum(_compare(one, other, margin) for one, other in pairs)


def _compare(alone: Generation, together: Generation, most: float) -> int:
    """Compares up to the first token that a near-tie turned; after it the contexts differ."""
    assert len(together.token_ids) == len(alone.token_ids)
    near_ties = 0
    pairs = zip(alone.logprobs, together.logprobs, strict=True)
    for position, (expected, found) in enumerate(pairs):
        margin = expected.top[0][1] - expected.top[1][1]
        near_ties += margin <= most
        if found.token_id != expected.token_id:
            assert margin <= most, (position, expected, found)
            return near_ties
        assert abs(found.logprob - expected.logprob) <= most, (position, expected, found)
    return near_ties


def arena_for(folder: Path, num_tokens: int, requests: int = 1) -> int:
    """Bytes of an arena that holds exactly `requests` requests of `num_tokens` tokens."""
    groups = read_config(folder, None).groups
    plan = plan_arena(groups, BASE.block_size, BASE.kv_cache_memory_bytes)
    return plan.unit_bytes * plan.units_for(num_tokens) * requests
