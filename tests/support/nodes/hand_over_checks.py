"""Checks of a hand-over from P to D, wherever the two run."""

from collections.abc import Iterable

import msgspec
import pytest

from engine.errors import KVTransferParamsError
from engine.types import FinishReason, KVTransferParams, SamplingParams
from tests.support.nodes.cluster import CONTEXT, Node, generate
from tests.support.nodes.pairs import (
    GREEDY,
    count_near_ties,
    hand_over,
    hand_over_all,
    prefill,
    prompt_of,
    request_of,
)

# One token; around one block; around one chunk of 64; several chunks; and three that reach the
# context limit after six tokens, after two, and at once.
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200, CONTEXT - 6, CONTEXT - 2, CONTEXT - 1)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=11, logprobs=1)
CHANGES: tuple[tuple[dict[str, object], str], ...] = (
    ({"remote_engine_id": None}, "partial_kv_transfer_params"),
    ({"signature": None}, "partial_kv_transfer_params"),
    ({"remote_host": "10.1.2.3"}, "foreign_kv_transfer_params"),
    ({"remote_num_tokens": 29}, "mismatched_kv_transfer_params"),
    ({"remote_request_id": "other"}, "foreign_kv_transfer_params"),
    ({"first_token_ids": (3,)}, "foreign_kv_transfer_params"),
)


async def check_tokens_and_logprobs(p: Node, d: Node, lengths: Iterable[int] = LENGTHS) -> None:
    """Bit-equal to those of one node, greedy and sampled."""
    for sampling in (GREEDY, SAMPLED):
        for length in lengths:
            prompt = prompt_of(length)
            alone = await generate(p, request_of(prompt, sampling))
            pair = await hand_over(p, d, prompt, sampling)
            assert pair.token_ids == alone.token_ids, (length, sampling)
            assert pair.logprobs == alone.logprobs, (length, sampling)
            assert pair.last.was_pulled == (len(pair.token_ids) > 1)
            if sampling is GREEDY:
                assert len(pair.token_ids) == min(12, CONTEXT - length)
                assert pair.last.finish_reason is FinishReason.LENGTH


async def check_one_token_moves_nothing(p: Node, d: Node) -> None:
    """The first token may be the last."""
    sampling = msgspec.structs.replace(GREEDY, max_tokens=1)
    pair = await hand_over(p, d, prompt_of(40), sampling)
    assert len(pair.token_ids) == 1
    assert pair.last.finish_reason is FinishReason.LENGTH
    assert not pair.last.was_pulled


async def cancel_behind_the_first_token(p: Node, d: Node) -> None:
    """Three times; the caller looks whether anything stays."""
    long = msgspec.structs.replace(GREEDY, max_tokens=CONTEXT)
    for _ in range(3):
        params = await prefill(p, prompt_of(90), long)
        stream = d.engine.generate(request_of(prompt_of(90), long, params))
        async for _output in stream:
            break
        await stream.aclose()


async def check_eight_at_once(p: Node, d: Node) -> str:
    """They agree with one at a time; how many near-ties there were."""
    prompts = [prompt_of(20 + 23 * i, salt=i) for i in range(8)]
    sampling = msgspec.structs.replace(GREEDY, max_tokens=40)
    alone = [await generate(p, request_of(prompt, sampling)) for prompt in prompts]
    together = await hand_over_all(p, d, prompts, sampling)
    assert all(done.last.was_pulled for done in together)
    return f"{count_near_ties(alone, together)} of {8 * 40} tokens"


async def check_refused(node: Node, params: KVTransferParams, code: str) -> None:
    """Parameters for a prompt of thirty tokens that this node must not take."""
    with pytest.raises(KVTransferParamsError) as caught:
        await generate(node, request_of(prompt_of(30), GREEDY, params))
    assert caught.value.code == code


async def check_recompute(d: Node, prompt: tuple[int, ...], params: KVTransferParams) -> None:
    """P is away: D computes alone, and nobody sees it."""
    alone = await generate(d, request_of(prompt))
    pair = await generate(d, request_of(prompt, GREEDY, params))
    assert pair.token_ids == alone.token_ids
    assert pair.logprobs == alone.logprobs
    assert not pair.last.was_pulled
