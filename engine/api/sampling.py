"""Sampling parameters of a request: its own values over the model's defaults over vLLM's. Pure."""

import secrets
from functools import cache
from typing import Any

import msgspec
import structlog
from msgspec import UnsetType

from engine.api.json_body import convert
from engine.api.schema import SamplingFields
from engine.api.serving import Serving
from engine.api.structured_output import grammar_of
from engine.errors import InvalidRequestError, PromptTooLongError
from engine.prompt_checks import check_token_ids
from engine.types import SamplingParams

log = structlog.get_logger()

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "min_tokens", "seed"),
)
_SEED_SPAN = 2**64


def sampling_params(
    fields: SamplingFields,
    serving: Serving,
    max_tokens: int,
    *,
    logprobs: int | None,
    remote_decode: bool,
) -> SamplingParams:
    """Bounds-checked parameters of a request; raises InvalidRequestError that names key and value.

    Without a seed a random one is drawn, so that every node that works on the request draws alike.
    """
    check_token_ids(fields.stop_token_ids or (), serving.vocab_size, "stop_token_ids")
    values: dict[str, Any] = {
        "seed": secrets.randbits(63),
        "max_tokens": max_tokens,
        "stop_token_ids": fields.stop_token_ids or (),
        "ignore_eos": fields.ignore_eos is True,
        "logprobs": logprobs,
        "grammar": _grammar(fields, serving),
        "logit_bias": fields.logit_bias or {},
        "allowed_token_ids": fields.allowed_token_ids or (),
    }
    for name in ("logit_bias", "allowed_token_ids"):
        check_token_ids(tuple(values[name]), serving.vocab_size, name)
    # Later sources win: the request's own values over the model's defaults.
    for source in (serving.defaults, fields):
        found = {name: getattr(source, name, None) for name in _SAMPLING}
        values.update((name, value) for name, value in found.items() if value is not None)
    sampling = convert(values, SamplingParams)
    for name in ("temperature", "repetition_penalty"):
        if values.get(name, least := getattr(sampling, name)) < least:
            _warn_that_it_was_raised(name, least)
    if sampling.min_tokens <= max_tokens:
        return sampling
    if remote_decode:  # a PD proxy leaves the client's `min_tokens` beside its own max_tokens=1
        return msgspec.structs.replace(sampling, min_tokens=max_tokens)
    raise InvalidRequestError(
        f"min_tokens={sampling.min_tokens} is more than max_tokens={max_tokens}", param="min_tokens"
    )


def _grammar(fields: SamplingFields, serving: Serving) -> str:
    grammar = grammar_of(fields)
    if grammar:
        serving.tokenizer.require_text("structured output")
    if grammar and fields.allowed_token_ids:
        raise InvalidRequestError(
            "a grammar and allowed_token_ids both bind the output: give one",
            param="allowed_token_ids",
        )
    return grammar


def with_seed_offset(sampling: SamplingParams, offset: int) -> SamplingParams:
    """The same parameters for choice `offset`: another seed, in the same 64 bits."""
    seed = (sampling.seed + offset + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2
    return msgspec.structs.replace(sampling, seed=seed)


@cache
def _warn_that_it_was_raised(name: str, least: float) -> None:
    """Once: a client may send the same value with every request."""
    log.warning("a sampling value is too small to compute with and was raised", **{name: least})


def resolve_max_tokens(
    fields: SamplingFields,
    serving: Serving,
    num_prompt_tokens: int,
    *,
    default: int | None,
    remote_decode: bool,
) -> int:
    """Tokens to generate: as asked, else the default cut to the room, else all the room.

    `num_prompt_tokens` is the length of the longest prompt, less than the context.
    `max_completion_tokens` goes before `max_tokens`, as in vLLM, except in a remote decode: PD
    proxies set `max_tokens` to 1 beside whatever the client sent.
    """
    max_tokens = None if isinstance(fields.max_tokens, UnsetType) else fields.max_tokens
    asked = [fields.max_completion_tokens, max_tokens]
    if remote_decode:
        asked.reverse()
    requested = next((it for it in asked if it is not None), None)
    room = serving.max_model_len - num_prompt_tokens
    if requested is None:
        return room if default is None else min(default, room)
    if requested < 1:
        raise InvalidRequestError(f"max_tokens={requested}: must be at least 1", param="max_tokens")
    if requested > room:
        raise PromptTooLongError(
            f"max_tokens={requested} does not fit: max_model_len is {serving.max_model_len} and "
            f"the prompt has {num_prompt_tokens} tokens; ask for at most {room} or shorten it",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return requested
