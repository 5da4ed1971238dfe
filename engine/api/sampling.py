"""Sampling parameters of a request: its own values over the model's defaults over vLLM's. Pure."""

import secrets
from functools import cache
from typing import Any

import msgspec
import structlog

from engine.api.json_body import convert
from engine.api.schema import SamplingFields
from engine.api.serving import SamplingDefaults, Serving
from engine.errors import InvalidRequestError
from engine.prompt_checks import check_token_ids
from engine.types import SamplingParams

log = structlog.get_logger()

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GIVEN = (*_DEFAULTED, "presence_penalty", "frequency_penalty", "min_tokens", "seed")
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
        **_named(serving.defaults, _DEFAULTED),
        **_named(fields, _GIVEN),
        "max_tokens": max_tokens,
        "stop_token_ids": fields.stop_token_ids or (),
        "ignore_eos": fields.ignore_eos is True,
        "logprobs": logprobs,
    }
    sampling = convert(values, SamplingParams)
    for name in ("temperature", "repetition_penalty"):
        if values.get(name, least := getattr(sampling, name)) < least:
            _warn_that_it_was_raised(name, least)
    return _with_min_tokens(sampling, cut=remote_decode)


def with_seed_offset(sampling: SamplingParams, offset: int) -> SamplingParams:
    """The same parameters for choice `offset`: another seed, in the same 64 bits."""
    seed = (sampling.seed + offset + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2
    return msgspec.structs.replace(sampling, seed=seed)


@cache
def _warn_that_it_was_raised(name: str, least: float) -> None:
    """Once: a client may send the same value with every request."""
    log.warning("a sampling value is too small to compute with and was raised", **{name: least})


def _named(source: SamplingFields | SamplingDefaults, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(source, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _with_min_tokens(sampling: SamplingParams, *, cut: bool) -> SamplingParams:
    """Cut what a PD proxy leaves: the client's `min_tokens` beside its own max_tokens=1."""
    if sampling.min_tokens <= sampling.max_tokens:
        return sampling
    if cut:
        return msgspec.structs.replace(sampling, min_tokens=sampling.max_tokens)
    raise InvalidRequestError(
        f"min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}",
        param="min_tokens",
    )
