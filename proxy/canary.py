"""A request of the proxy's own that shows that nodes can serve, before clients' requests come.

A node that describes itself as ready may still be of no use: peers cannot read its memory, refuse
its model, or its first step fails. The canary is a prompt that no cache knows, prefilled on P,
pulled and decoded on D: all that a client's request would need.
"""

import asyncio
import secrets
from contextlib import aclosing
from typing import Final

from engine.errors import TandemError, UnavailableError
from engine.types import GenerateOutput, GenerateRequest, SamplingParams
from proxy.backends.worker import Call, HandOver
from proxy.cluster.node import Node
from serving.rpc.client import StreamDeadlines

PROMPT_TOKENS: Final = 64
NEW_TOKENS: Final = 2
COUNT_S: Final = 5.0
COUNTS: Final = 3
"""Looks at D's counter, which may be a moment late."""
COUNT_PAUSE_S: Final = 0.2
DEADLINES: Final = StreamDeadlines(total_s=60.0, first_output_s=60.0, next_output_s=30.0)


async def decode_alone(decode: Node) -> None:
    """D computes a prompt and goes on. Raises a TandemError if it does not."""
    await _last_output(decode, _request(decode), None)


async def hand_over(prefill: Node, decode: Node) -> None:
    """P computes a prompt, D pulls it and goes on. Raises a TandemError if they do not."""
    request = _request(decode)
    call = Call(DEADLINES, prefill.worker.encode_prompt(request))
    num_before = await decode.worker.num_pulled_tokens(COUNT_S)
    held = (await prefill.worker.prefill(request, call)).hand_over
    if held is None:
        raise UnavailableError(f"node {prefill.name} prefilled and handed nothing over")
    try:
        last = await _last_output(decode, request, held)
    except TandemError:
        prefill.release(held.engine_id, held.request_id)
        raise
    if not last.was_pulled and not await _has_pulled_since(decode, num_before):
        cause = "nothing was pulled" if last.kv_transfer is None else last.kv_transfer.cause
        raise UnavailableError(f"node {decode.name} cannot pull from {prefill.name}: {cause}")


async def _has_pulled_since(decode: Node, num_before: int) -> bool:
    """True where D counts pulled tokens, and has more of them by now."""
    for _ in range(COUNTS):
        if await decode.worker.num_pulled_tokens(COUNT_S) > num_before:
            return True
        await asyncio.sleep(COUNT_PAUSE_S)
    return False


def _request(decode: Node) -> GenerateRequest:
    length = max(1, min(PROMPT_TOKENS, decode.info.max_model_len - NEW_TOKENS))
    tokens = [secrets.randbelow(decode.info.vocab_size) for _ in range(length)]
    return GenerateRequest(
        request_id=f"canary-{secrets.token_hex(8)}",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True),
        cache_salt=secrets.token_hex(8),
    )


async def _last_output(
    decode: Node, request: GenerateRequest, held: HandOver | None
) -> GenerateOutput:
    call = Call(DEADLINES, decode.worker.encode_prompt(request))
    async with aclosing(decode.worker.generate(request, call, held)) as outputs:
        async for output in outputs:
            if output.finish_reason is not None:
                return output
    raise UnavailableError(f"node {decode.name} ended its answer early")
