"""Requests and answers of SGLang's /generate, with prompts and answers as token ids. Pure."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engine.errors import InvalidRequestError, RequestAbortedError, TandemError
from engine.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    SamplingParams,
    TokenIdOnWire,
    TokenLogprob,
)
from proxy.backends.http_worker import error_of

DONE: Final = b"[DONE]"
MAX_REPETITION_PENALTY: Final = 2.0
"""SGLang's own bound."""
_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
# One rule with one pattern is what llguidance makes of a regular expression.
_REGEX: Final = re.compile(r"start: /((?:[^/\\\n]|\\.)+)/")
_STRING: Final = r'"(?:[^"\\\n]|\\.)*"'
_CHOICE: Final = re.compile(rf"start: ({_STRING}(?: \| {_STRING})*)")
_encode = msgspec.json.Encoder().encode


class _Finish(msgspec.Struct):
    type: str
    matched: Any = None
    message: str | None = None
    status_code: int | None = None


Entry = tuple[float | None, TokenIdOnWire, Any]
"""Log-probability, token id, text."""


class _Meta(msgspec.Struct):
    """`completion_tokens`: of the whole answer so far. Lists are of it too, or of new ones."""

    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: tuple[Entry, ...] = ()
    output_top_logprobs: tuple[tuple[Entry, ...] | None, ...] = ()


class _Error(msgspec.Struct):
    message: str = ""
    code: Any = None


class Chunk(msgspec.Struct):
    """One event of a stream, or a whole answer."""

    output_ids: tuple[TokenIdOnWire, ...] = ()
    meta_info: _Meta | None = None
    error: _Error | None = None

    @property
    def failure(self) -> TandemError | None:
        """The error that it tells of, if it does."""
        if self.error is not None:
            return _failure(self.error.message, self.error.code)
        finish = None if self.meta_info is None else self.meta_info.finish_reason
        if finish is None or finish.type != "abort":
            return None
        return _failure(finish.message or "the request was aborted", finish.status_code)


_CHUNK: Final = msgspec.json.Decoder(Chunk)


class Answer:
    """The outputs of one streamed answer, out of chunks that repeat it all or are only new."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.last: GenerateOutput | None = None
        self._sampling = sampling
        self._num_seen = 0

    def outputs_of(self, data: list[bytes]) -> Iterator[GenerateOutput]:
        """Outputs with tokens, of events that came together; the last one is kept in `last`."""
        for event in data:
            if event == DONE or self.last is not None:
                continue
            output = self._output_of(chunk_of(event))
            if output.finish_reason is not None:
                self.last = output
            elif output.token_ids:
                yield output

    def _output_of(self, chunk: Chunk) -> GenerateOutput:
        """The new part. Raises for an error, and RequestAbortedError for what makes no sense."""
        if (failure := chunk.failure) is not None:
            raise failure
        if (meta := chunk.meta_info) is None:
            raise RequestAbortedError("the worker's event has no meta_info")
        num_new = meta.completion_tokens - self._num_seen
        if not 0 <= num_new <= len(chunk.output_ids):
            raise RequestAbortedError(
                f"the worker's event counts {meta.completion_tokens} tokens after "
                f"{self._num_seen}, and has {len(chunk.output_ids)}"
            )
        self._num_seen += num_new
        finish = meta.finish_reason
        return GenerateOutput(
            token_ids=chunk.output_ids[len(chunk.output_ids) - num_new :],
            logprobs=self._logprobs(meta, num_new),
            finish_reason=None if finish is None else _REASONS.get(finish.type, FinishReason.ERROR),
            stop_reason=None if finish is None else self._stop_reason(finish),
            num_cached_tokens=max(0, meta.cached_tokens),
        )

    def _stop_reason(self, finish: _Finish) -> int | None:
        is_own = isinstance(finish.matched, int) and finish.matched in self._sampling.stop_token_ids
        return finish.matched if is_own else None

    def _logprobs(self, meta: _Meta, num_new: int) -> tuple[TokenLogprob, ...] | None:
        if (num_top := self._sampling.logprobs) is None:
            return None
        own, tops = meta.output_token_logprobs, meta.output_top_logprobs
        if len(own) < num_new or (num_top and len(tops) < num_new):
            raise RequestAbortedError("the worker's log-probabilities do not fit its tokens")
        rows = tops[len(tops) - num_new :] if num_top else ((),) * num_new
        return tuple(
            TokenLogprob(token, value or 0.0, _best(row, num_top))
            for (value, token, _), row in zip(own[len(own) - num_new :], rows, strict=True)
        )


def chunk_of(body: bytes) -> Chunk:
    """Raises RequestAbortedError for what is none."""
    try:
        return _CHUNK.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestAbortedError(f"the worker's answer is not /generate's: {error}") from error


def prompt_json(request: GenerateRequest) -> bytes:
    """The prompt's token ids, as they stand in each body."""
    return _encode(request.prompt_token_ids)


def body_for(request: GenerateRequest, *, prompt: bytes, stream: bool, **more: object) -> bytes:
    """The body that goes on after the output so far, if there is one. Alike for P and D.

    Raises InvalidRequestError for what SGLang has no words for.
    """
    sampling, num_output = request.sampling, len(request.output_token_ids)
    if num_output:
        prompt = prompt[:-1] + b"," + _encode(request.output_token_ids)[1:]
    body: dict[str, object] = {
        "input_ids": msgspec.Raw(prompt),
        "sampling_params": _sampling(sampling, num_output),
        "stream": stream,
        **more,
    }
    if sampling.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.priority:
        body["priority"] = request.priority
    return _encode(body)


def _sampling(sampling: SamplingParams, num_output: int) -> dict[str, object]:
    """The parameters that count from the end of `num_output` tokens."""
    _check(sampling)
    words: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens - num_output,
        "min_new_tokens": max(0, sampling.min_tokens - num_output),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop_token_ids:
        words["stop_token_ids"] = sampling.stop_token_ids
    if sampling.temperature:
        words["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        words["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.grammar:
        words |= constraint(sampling.grammar)
    return words


def _check(sampling: SamplingParams) -> None:
    unknown = {
        "bad_words": sampling.bad_words,
        "allowed_token_ids": sampling.allowed_token_ids,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
    }
    for name, is_given in unknown.items():
        if is_given:
            raise InvalidRequestError(f"workers of SGLang know no {name}", param=name)
    if sampling.repetition_penalty > MAX_REPETITION_PENALTY:
        raise InvalidRequestError(
            f"workers of SGLang take no repetition_penalty above {MAX_REPETITION_PENALTY}",
            param="repetition_penalty",
        )


def constraint(grammar: str) -> dict[str, str]:
    """SGLang's words for a grammar of llguidance's: a JSON schema, a pattern, or a choice.

    Its `ebnf` is no Lark, so that other grammars cannot be passed on.
    """
    lark = grammar
    if grammar.startswith("{"):
        given = json.loads(grammar)["grammars"]
        part = given[0] if len(given) == 1 else {}
        if (schema := part.get("json_schema")) is not None:
            # Options of one library that another need not know.
            known = {key: it for key, it in schema.items() if key != "x-guidance"}
            return {"json_schema": json.dumps(known)}
        lark = part.get("lark_grammar") or ""
    if found := _REGEX.fullmatch(lark.strip()):
        return {"regex": found[1].replace("\\/", "/")}
    if found := _CHOICE.fullmatch(lark.strip()):
        return {"ebnf": f"root ::= {found[1]}"}
    raise InvalidRequestError(
        "workers of SGLang take JSON schemas, regular expressions and choices, and no Lark grammar",
        param="structured_outputs",
    )


def _failure(message: str, status: object) -> TandemError:
    if isinstance(status, int) and 400 <= status < 600:
        return error_of(status, _encode({"error": {"message": message}}))
    return RequestAbortedError(message)


def _best(row: tuple[Entry, ...] | None, num_top: int) -> tuple[tuple[int, float], ...]:
    known = [(token, value) for value, token, _ in row or () if value is not None]
    return tuple(sorted(known, key=lambda it: -it[1])[:num_top])
