"""Requests and answers of /v1/completions, with prompts and answers as token ids. Pure.

Every word is vLLM's; OpenAI's own API knows no token ids.
"""

import json
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError, RequestAbortedError
from engine.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    TokenIdOnWire,
    TokenLogprob,
)

TOKEN: Final = "token_id:"
"""Before the id where log-probabilities name a token (`return_tokens_as_token_ids`)."""
_REASONS: Final = {str(it): it for it in FinishReason}
_encode = msgspec.json.Encoder().encode


class _Logprobs(msgspec.Struct):
    """One entry for each token."""

    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int = 1


class _Choice(msgspec.Struct):
    token_ids: tuple[TokenIdOnWire, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: tuple[dict[str, _PromptLogprob] | None, ...] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: Any = None


class Completion(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Error | None = None
    kv_transfer_params: Annotated[dict[str, Any], Meta(max_length=256)] | None = None

    @property
    def choice(self) -> _Choice:
        """One is asked for."""
        return self.choices[0]

    @property
    def num_cached(self) -> int:
        """Cached prompt tokens; 0 also where the worker does not tell them."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return max(0, details.cached_tokens or 0) if details is not None else 0

    @property
    def error_status(self) -> int:
        """HTTP status of an error that came too late to be one."""
        code = None if self.error is None else self.error.code
        return code if isinstance(code, int) and 400 <= code < 600 else 500

    def prompt_logprobs(self, request: GenerateRequest) -> PromptLogprobs:
        """The rows of every prompt token after the first."""
        rows = self.choice.prompt_logprobs or ()
        num_top = request.sampling.prompt_logprobs or 0
        tokens, values, ranks = [], [], []
        for token, row in zip(request.prompt_token_ids[1:], rows[1:], strict=False):
            known = row or {}
            if (own := known.get(str(token))) is None or len(known) < num_top:
                raise RequestAbortedError("the worker's prompt_logprobs are not of this prompt")
            best = sorted(known.items(), key=lambda it: it[1].rank)[:num_top]
            tokens += [token, *(_number(name) for name, _ in best)]
            values += [own.logprob, *(it.logprob for _, it in best)]
            ranks.append(own.rank)
        return PromptLogprobs(num_top, tuple(tokens), tuple(values), tuple(ranks))


_COMPLETION = msgspec.json.Decoder(Completion)


def prompt_json(request: GenerateRequest) -> bytes:
    """The prompt's token ids, as they stand in each body."""
    return _encode(request.prompt_token_ids)


def body_for(
    request: GenerateRequest, model: str, *, prompt: bytes, stream: bool, **more: object
) -> bytes:
    """The body that goes on after the output so far, if there is one.

    Raises InvalidRequestError for what vLLM's API has no words for.
    """
    sampling, num_output = request.sampling, len(request.output_token_ids)
    if num_output:
        # After the last id of the prompt, which is not encoded again.
        prompt = prompt[:-1] + b"," + _encode(request.output_token_ids)[1:]
    body: dict[str, object] = {
        "model": model,
        "prompt": msgspec.Raw(prompt),
        "add_special_tokens": False,
        "stream": stream,
        "return_token_ids": True,
        **_sampling(sampling, num_output),
        **more,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.priority:
        body["priority"] = request.priority
    return _encode(body)


def completion_of(body: bytes) -> Completion:
    """Raises RequestAbortedError for what is none."""
    try:
        return _COMPLETION.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestAbortedError(f"the worker's answer is no completion: {error}") from error


def output_of(choice: _Choice, sampling: SamplingParams, *, num_cached: int) -> GenerateOutput:
    """One choice as our own output."""
    reason = None
    if choice.finish_reason is not None:
        reason = _REASONS.get(choice.finish_reason, FinishReason.ERROR)
    stop = choice.stop_reason if isinstance(choice.stop_reason, int) else None
    logprobs = None
    if sampling.logprobs is not None and choice.logprobs is not None:
        logprobs = _logprobs(choice.logprobs, sampling.logprobs)
    return GenerateOutput(
        token_ids=choice.token_ids or (),
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=stop,
        num_cached_tokens=num_cached,
    )


def _sampling(sampling: SamplingParams, num_output: int) -> dict[str, object]:
    """The parameters that count from the end of `num_output` tokens."""
    if sampling.bad_words:
        raise InvalidRequestError("bad_words cannot be passed on to this engine", param="bad_words")
    words: dict[str, object] = {
        "max_tokens": sampling.max_tokens - num_output,
        "min_tokens": max(0, sampling.min_tokens - num_output),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sampling.stop_token_ids,
    }
    # A greedy answer needs none, and a generator of its own costs the worker time.
    if sampling.temperature:
        words["seed"] = sampling.seed
    if sampling.logprobs is not None:
        words |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.prompt_logprobs is not None:
        words["prompt_logprobs"] = sampling.prompt_logprobs
    if sampling.logit_bias:
        words["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.allowed_token_ids:
        words["allowed_token_ids"] = sampling.allowed_token_ids
    if sampling.grammar:
        words["structured_outputs"] = structured_outputs(sampling.grammar)
    return words


def structured_outputs(grammar: str) -> dict[str, object]:
    """vLLM's words for a grammar of llguidance's: Lark as it is, or one grammar in its JSON."""
    if not grammar.startswith("{"):
        return {"grammar": grammar}
    given = json.loads(grammar)["grammars"]
    if len(given) == 1 and (schema := given[0].get("json_schema")):
        # Options of one library that another need not know.
        return {"json": {key: it for key, it in schema.items() if key != "x-guidance"}}
    if len(given) == 1 and (lark := given[0].get("lark_grammar")):
        return {"grammar": lark}
    raise InvalidRequestError("a grammar of several parts cannot be passed on to this engine")


def _logprobs(told: _Logprobs, num_top: int) -> tuple[TokenLogprob, ...]:
    tops = told.top_logprobs or (None,) * len(told.tokens)
    if not len(told.tokens) == len(told.token_logprobs) == len(tops):
        raise RequestAbortedError("the worker's log-probabilities do not fit its tokens")
    return tuple(
        TokenLogprob(_token_id(token), value or 0.0, _best(top or {}, num_top))
        for token, value, top in zip(told.tokens, told.token_logprobs, tops, strict=True)
    )


def _best(top: dict[str, float], num_top: int) -> tuple[tuple[int, float], ...]:
    best = sorted(top.items(), key=lambda it: -it[1])[:num_top]
    return tuple((_token_id(name), value) for name, value in best)


def _token_id(name: str) -> int:
    if not name.startswith(TOKEN):
        raise RequestAbortedError(f"the worker names a token {name[:40]!r}, and no token id")
    return _number(name.removeprefix(TOKEN))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise RequestAbortedError(f"the worker names a token {text[:40]!r}, and no token id")
    return int(text)
