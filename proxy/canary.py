"""A request of the proxy's own that shows that nodes can serve, before clients' requests come.

A node that describes itself as ready may still be of no use: peers cannot read its memory, refuse
its model, or its first step fails. The canary is a prompt that no cache knows, prefilled on P,
pulled and decoded on D: all that a client's request would need.
"""

import secrets
from contextlib import aclosing
from typing import Final

from msgspec import structs

from engine.errors import TandemError, UnavailableError
from engine.types import GenerateOutput, GenerateRequest, SamplingParams
from proxy.cluster.node import Node
from proxy.request_state import prefill_request
from serving.rpc.client import StreamDeadlines

PROMPT_TOKENS: Final = 64
NEW_TOKENS: Final = 2
DEADLINES: Final = StreamDeadlines(total_s=60.0, first_output_s=60.0, next_output_s=30.0)


async def decode_alone(decode: Node) -> None:
    """D computes a prompt and goes on. Raises a TandemError if it does not."""
    await _last_output(decode, _request(decode))


async def hand_over(prefill: Node, decode: Node) -> None:
    """P computes a prompt, D pulls it and goes on. Raises a TandemError if they do not."""
    request = _request(decode)
    first = await _last_output(prefill, prefill_request(request))
    params = first.kv_transfer_params
    if params is None:
        raise UnavailableError(f"node {prefill.name} prefilled without kv_transfer_params")
    try:
        last = await _last_output(decode, structs.replace(request, kv_transfer_params=params))
    except TandemError:
        if params.remote_engine_id is not None and params.remote_request_id is not None:
            prefill.release(params.remote_engine_id, params.remote_request_id)
        raise
    if not last.was_pulled:
        cause = "nothing was pulled" if last.kv_transfer is None else last.kv_transfer.cause
        raise UnavailableError(f"node {decode.name} cannot pull from {prefill.name}: {cause}")


def _request(decode: Node) -> GenerateRequest:
    length = max(1, min(PROMPT_TOKENS, decode.info.max_model_len - NEW_TOKENS))
    tokens = [secrets.randbelow(decode.info.vocab_size) for _ in range(length)]
    return GenerateRequest(
        request_id=f"canary-{secrets.token_hex(8)}",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True),
        cache_salt=secrets.token_hex(8),
    )


async def _last_output(node: Node, request: GenerateRequest) -> GenerateOutput:
    async with aclosing(node.client.generate(request, DEADLINES)) as outputs:
        async for output in outputs:
            if output.finish_reason is not None:
                return output
    raise UnavailableError(f"node {node.name} ended its answer early")
