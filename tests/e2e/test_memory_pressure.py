"""Many requests on a node for few: who is next, who is preempted, and tokens that stay the same."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.types import SamplingParams
from serving.node.server import NodeServer
from tests.support.nodes.cluster import Cluster, Generation, generate, until
from tests.support.nodes.pairs import (
    FAMILIES,
    GREEDY,
    arena_for,
    count_near_ties,
    hand_over,
    hand_over_all,
    prompt_of,
    request_of,
)
from tests.tiers import everyday

PROMPTS = [prompt_of(40 + 9 * i, salt=3 * i) for i in range(8)]
SAMPLING = msgspec.structs.replace(GREEDY, max_tokens=120)
LONGEST = len(PROMPTS[-1]) + SAMPLING.max_tokens


def preemptions(node: NodeServer) -> int:
    return node.engine.core.scheduler.stats.num_preemptions


async def alone(node: NodeServer) -> list[Generation]:
    return [await generate(node, request_of(prompt, SAMPLING)) for prompt in PROMPTS]


@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5",)))
async def test_preempted_requests_end_with_the_tokens_of_requests_run_alone(
    shared: Cluster,
    checkpoints: dict[str, Path],
    record_property: Callable[[str, object], None],
    family: str,
) -> None:
    """Their own prompts on one node, then prompts that another has prefilled."""
    roomy, small = await shared.pair(
        checkpoints[family], d={"kv_cache_memory_bytes": arena_for(checkpoints[family], LONGEST, 3)}
    )
    expected = await alone(roomy)
    requests = [request_of(prompt, SAMPLING) for prompt in PROMPTS]
    together = await asyncio.gather(*(generate(small, request) for request in requests))
    before = preemptions(small)
    assert before
    pulled = await hand_over_all(roomy, small, PROMPTS, SAMPLING)
    assert preemptions(small) > before
    near_ties = count_near_ties(expected * 2, together + pulled)
    record_property("near-ties", f"{near_ties} of {2 * len(PROMPTS) * SAMPLING.max_tokens} tokens")


async def test_a_prefill_node_full_of_leases_goes_on_when_they_end(
    shared: Cluster, model: Path
) -> None:
    d = await shared.start("decode", model)
    p = await shared.start(
        "prefill",
        model,
        kv_cache_memory_bytes=arena_for(model, LONGEST, 2),
    )
    expected = [await hand_over(p, d, prompt) for prompt in PROMPTS]
    together = await hand_over_all(p, d, PROMPTS, GREEDY)
    count_near_ties(expected, together)


async def test_the_most_urgent_is_next_and_then_who_came_first(
    shared: Cluster, checkpoints: dict[str, Path]
) -> None:
    """One seat, and four that wait for it."""
    node = await shared.start(
        "decode", checkpoints["qwen3"], scheduling_policy="priority", max_num_seqs=1
    )
    long = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    seated = asyncio.create_task(generate(node, request_of(prompt_of(9), long)))
    ended: list[tuple[int, int]] = []

    async def wait_for_a_seat(number: int, priority: int) -> None:
        request = msgspec.structs.replace(request_of(prompt_of(5 + number)), priority=priority)
        await generate(node, request)
        ended.append((number, priority))

    waiting = []
    for number, priority in enumerate((0, 5, -5, 0)):
        waiting.append(asyncio.create_task(wait_for_a_seat(number, priority)))
        await until(lambda: node.engine.core.scheduler.num_waiting == len(waiting) or seated.done())
    assert not seated.done()
    await asyncio.gather(seated, *waiting)
    assert ended == [(2, -5), (0, 0), (3, 0), (1, 5)]
