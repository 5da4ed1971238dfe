"""Sampling parameters of a request and the length of its output. Pure."""

import secrets
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
import structlog
from msgspec import UnsetType

from engine.errors import InvalidRequestError, PromptTooLongError
from engine.prompt_checks import check_bad_words, check_token_ids
from engine.types import BadWord, SamplingParams, TokenId
from serving.api.json_body import convert
from serving.api.schema import CompletionRequest, SamplingFields
from serving.api.served_model import ServedModel
from serving.api.structured_output import grammar_of

log = structlog.get_logger()

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "min_tokens", "seed"),
)
_SEED_SPAN = 2**64


def sampling_params(
    fields: SamplingFields,
    served: ServedModel,
    max_tokens: int,
    *,
    logprobs: int | None,
    grammar: str,
    remote_decode: bool,
) -> SamplingParams:
    """Bounds-checked parameters of a request; raises InvalidRequestError that names key and value.

    Without a seed a random one is drawn, so that every node that works on the request draws alike.
    """
    check_token_ids(fields.stop_token_ids or (), served.vocab_size, "stop_token_ids")
    values: dict[str, Any] = {
        "seed": secrets.randbits(63),
        "max_tokens": max_tokens,
        "stop_token_ids": fields.stop_token_ids or (),
        "ignore_eos": bool(fields.ignore_eos),
        "logprobs": logprobs,
        "prompt_logprobs": _prompt_logprobs(fields, logprobs),
        "bad_words": _bad_words(fields.bad_words or (), served),
        "grammar": grammar,
        "logit_bias": fields.logit_bias or {},
        "allowed_token_ids": fields.allowed_token_ids or (),
    }
    for name in ("logit_bias", "allowed_token_ids"):
        check_token_ids(tuple(values[name]), served.vocab_size, name)
    # Later sources win: the request's own values over the model's defaults.
    for source in (served.defaults, fields):
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


def _bad_words(words: Sequence[str], served: ServedModel) -> tuple[BadWord, ...]:
    """Each word as it is written at the start of a text and after a space, as in vLLM."""
    if words:
        served.tokenizer.require_text("bad_words")
    encode = partial(served.tokenizer.encode, add_special_tokens=False)
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    # A dictionary: each once, in an order that all nodes share.
    found = dict.fromkeys(map(encode, texts))
    bad = tuple(BadWord(token_ids) for token_ids in found if token_ids)
    check_bad_words(bad, served.vocab_size)
    return bad


def check_best_of(fields: CompletionRequest) -> None:
    """Raise InvalidRequestError where more would be generated than is returned, as vLLM does."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidRequestError(
            f"best_of={fields.best_of} with n={fields.n or 1} is not supported: ask for n choices "
            "with logprobs, and choose",
            param="best_of",
        )


def asked_grammar(fields: SamplingFields, served: ServedModel) -> str:
    """The grammar that a body asks for, empty for none; raises InvalidRequestError."""
    grammar = grammar_of(fields)
    if grammar:
        served.tokenizer.require_text("structured output")
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


def cut_prompts(
    fields: SamplingFields, prompts: Sequence[tuple[TokenId, ...]], served: ServedModel
) -> Sequence[tuple[TokenId, ...]]:
    """The last `truncate_prompt_tokens` tokens of each prompt; -1: as many as leave room.

    Raises InvalidRequestError where that is none.
    """
    most = fields.truncate_prompt_tokens
    if most is None:
        return prompts
    if most > served.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={most} is more than max_model_len={served.max_model_len}",
            param="truncate_prompt_tokens",
        )
    if most == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens=0 leaves no prompt: ask for 1 or more, for -1 to fit the "
            "context, or leave it out",
            param="truncate_prompt_tokens",
        )
    if most == -1:
        most = _room_beside_output(fields, served)
    return [prompt[-most:] for prompt in prompts]


def _room_beside_output(fields: SamplingFields, served: ServedModel) -> int:
    """Tokens that a prompt may have, at least 1."""
    requested = _requested(fields, remote_decode=False) or 1
    if requested >= served.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {served.max_model_len} tokens. However, "
            f"max_tokens={requested} leaves no room for a prompt: ask for at most "
            f"{served.max_model_len - 1}.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return served.max_model_len - requested


def resolve_max_tokens(
    fields: SamplingFields,
    served: ServedModel,
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
    requested = _requested(fields, remote_decode=remote_decode)
    room = served.max_model_len - num_prompt_tokens
    if requested is None:
        return room if default is None else min(default, room)
    if requested < 1:
        raise InvalidRequestError(
            f"max_tokens={requested}: must be at least 1, or 0 with echo", param="max_tokens"
        )
    if requested > room:
        raise PromptTooLongError(
            f"This model's maximum context length is {served.max_model_len} tokens. However, you "
            f"requested {num_prompt_tokens + requested}: {num_prompt_tokens} in the prompt and "
            f"max_tokens={requested}. Ask for at most {room}, or shorten the prompt.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return requested


def _requested(fields: SamplingFields, *, remote_decode: bool) -> int | None:
    max_tokens = None if isinstance(fields.max_tokens, UnsetType) else fields.max_tokens
    asked = [fields.max_completion_tokens, max_tokens]
    if remote_decode:
        asked.reverse()
    return next((it for it in asked if it is not None), None)
