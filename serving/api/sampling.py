"""Sampling parameters of a request: its own values over the model's defaults over vLLM's. Pure."""

import secrets
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
import structlog

from engine.errors import InvalidRequestError
from engine.prompt_checks import check_bad_words, check_token_ids
from engine.types import BadWord, SamplingParams
from serving.api.json_body import convert
from serving.api.schema import CompletionRequest, SamplingFields
from serving.api.serving import Serving
from serving.api.structured_output import grammar_of

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
        "prompt_logprobs": _prompt_logprobs(fields, logprobs),
        "bad_words": _bad_words(fields.bad_words or (), serving),
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


def _prompt_logprobs(fields: SamplingFields, logprobs: int | None) -> int | None:
    """Alternatives for each token of the prompt; an echo shows those of its tokens, too."""
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequestError(
            "prompt_logprobs are not available with stream=true", param="prompt_logprobs"
        )
    echo = isinstance(fields, CompletionRequest) and fields.echo
    asked = (fields.prompt_logprobs, logprobs if echo else None)
    return max((it for it in asked if it is not None), default=None)


def _bad_words(words: Sequence[str], serving: Serving) -> tuple[BadWord, ...]:
    """Each word as it is written at the start of a text and after a space, as in vLLM."""
    if words:
        serving.tokenizer.require_text("bad_words")
    encode = partial(serving.tokenizer.encode, add_special_tokens=False)
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    # A dictionary: each once, in an order that all nodes share.
    found = dict.fromkeys(map(encode, texts))
    bad = tuple(BadWord(token_ids) for token_ids in found if token_ids)
    check_bad_words(bad, serving.vocab_size)
    return bad


def check_best_of(fields: CompletionRequest) -> None:
    """Raise InvalidRequestError where more would be generated than is returned, as vLLM does."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidRequestError(
            f"best_of={fields.best_of} with n={fields.n or 1} is not supported: ask for n choices "
            "with logprobs, and choose",
            param="best_of",
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
