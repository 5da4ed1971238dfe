"""Turns a parsed request into sequences to generate and rules for the reply.

Pure; knows nothing of HTTP.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from engine.api.limits import requested_max_tokens, resolve_max_tokens
from engine.api.sampling import sampling_params, with_seed_offset
from engine.api.schema import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    StreamOptions,
)
from engine.api.serving import Serving
from engine.errors import InvalidRequestError, KVTransferParamsError, UnknownModelError
from engine.prompt_checks import check_prompt
from engine.types import GenerateRequest, KVTransferParams, TokenId

COMPLETION_MAX_TOKENS = 16

TokenIds = tuple[TokenId, ...]


@dataclass(slots=True, frozen=True)
class TextRules:
    """How the tokens of a reply become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(slots=True, frozen=True)
class Plan:
    """One HTTP request: `requests[i]` makes choice i from prompt `i // choices_per_prompt`."""

    id: str
    created: int
    model: str
    prompts: tuple[TokenIds, ...]
    requests: tuple[GenerateRequest, ...]
    choices_per_prompt: int
    text: TextRules
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    prompt_tokens_details: bool

    def prompt_of(self, choice: int) -> TokenIds:
        return self.prompts[choice // self.choices_per_prompt]


def plan_completion(
    fields: CompletionRequest, kv_params: KVTransferParams | None, serving: Serving
) -> Plan:
    """Plan of POST /v1/completions; raises InvalidRequestError leaves."""
    check_model(fields.model, serving)
    prompts = _completion_prompts(fields, serving)
    default = None if fields.max_tokens is None else COMPLETION_MAX_TOKENS
    return _plan(
        fields, prompts, kv_params, serving=serving, default=default, logprobs=fields.logprobs
    )


def plan_chat(fields: ChatRequest, kv_params: KVTransferParams | None, serving: Serving) -> Plan:
    """Plan of POST /v1/chat/completions; raises InvalidRequestError leaves."""
    check_model(fields.model, serving)
    logprobs = _chat_logprobs(fields)
    prompt = serving.tokenizer.encode_chat(
        [message.for_template() for message in fields.messages],
        add_generation_prompt=fields.add_generation_prompt is not False,
        extra=fields.chat_template_kwargs or {},
        max_tokens=serving.max_model_len,
    )
    default = serving.defaults.max_new_tokens
    return _plan(fields, [prompt], kv_params, serving=serving, default=default, logprobs=logprobs)


def check_model(name: str | None, serving: Serving) -> None:
    """Raise UnknownModelError unless `name` is served here or not given."""
    if name is not None and name not in serving.served_model_names:
        raise UnknownModelError(
            f"model {name[:256]!r} is not served here: use {serving.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _completion_prompts(fields: CompletionRequest, serving: Serving) -> list[TokenIds]:
    add_special_tokens = fields.add_special_tokens is not False
    return [
        serving.tokenizer.encode(
            prompt, add_special_tokens=add_special_tokens, max_tokens=serving.max_model_len
        )
        if isinstance(prompt, str)
        else prompt
        for prompt in _split_prompts(fields.prompt)
    ]


def _split_prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | TokenIds]:
    """One entry per prompt; a flat list of ids is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    ids = tuple(item for item in prompt if isinstance(item, int))
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise InvalidRequestError("prompt mixes token ids with texts or lists", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are accepted",
            param="prompt",
        )
    return [tuple(item) if isinstance(item, list) else str(item) for item in prompt]


def _chat_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequestError(
            f"top_logprobs={fields.top_logprobs} needs logprobs=true", param="top_logprobs"
        )
    return None


def _plan(
    fields: SamplingFields,
    prompts: Sequence[TokenIds],
    kv_params: KVTransferParams | None,
    *,
    serving: Serving,
    default: int | None,
    logprobs: int | None,
) -> Plan:
    for prompt in prompts:
        check_prompt(prompt, vocab_size=serving.vocab_size, max_model_len=serving.max_model_len)
    remote_decode = kv_params is not None and kv_params.do_remote_decode
    _check_shape(fields, len(prompts), kv_params)
    max_tokens = resolve_max_tokens(
        requested_max_tokens(fields, remote_decode=remote_decode),
        default=default,
        prompt_tokens=max(map(len, prompts)),
        max_model_len=serving.max_model_len,
    )
    sampling = sampling_params(
        fields, serving, max_tokens, logprobs=logprobs, remote_decode=remote_decode
    )
    options = fields.stream_options or StreamOptions()
    template = GenerateRequest(
        request_id=_new_id(fields),
        prompt_token_ids=(),
        sampling=sampling,
        kv_transfer_params=kv_params,
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
    )
    return Plan(
        id=template.request_id,
        created=int(time.time()),
        model=serving.model_name,
        prompts=tuple(prompts),
        requests=_requests(template, prompts, fields.n or 1),
        choices_per_prompt=fields.n or 1,
        text=_text_rules(fields, serving, remote_decode=remote_decode),
        stream=fields.stream is True,
        include_usage=options.include_usage is True,
        continuous_usage=options.include_usage is True and options.continuous_usage_stats is True,
        return_token_ids=fields.return_token_ids is True,
        prompt_tokens_details=serving.enable_prompt_tokens_details,
    )


def _check_shape(fields: SamplingFields, prompts: int, kv_params: KVTransferParams | None) -> None:
    """Refuse what cannot go together; a PD proxy's leftovers in a remote decode are let pass."""
    n = fields.n or 1
    if n * prompts > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"n={n} for {prompts} prompts makes {n * prompts} sequences: at most {MAX_SEQUENCES} "
            "are generated in one request",
            param="n",
        )
    if kv_params is not None and (prompts > 1 or n > 1):
        raise KVTransferParamsError(
            f"kv_transfer_params describe one sequence, not {prompts} prompts with n={n}"
        )
    remote_decode = kv_params is not None and kv_params.do_remote_decode
    if fields.stream_options is not None and not fields.stream and not remote_decode:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")


def _new_id(fields: SamplingFields) -> str:
    """A fresh id: whatever the client calls its request stays a label."""
    kind = "chatcmpl" if isinstance(fields, ChatRequest) else "cmpl"
    return f"{kind}-{uuid.uuid4().hex}"


def _text_rules(fields: SamplingFields, serving: Serving, *, remote_decode: bool) -> TextRules:
    """A remote decode ignores stop strings: the decoding node will see the same text."""
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if remote_decode:
        stop = ()
    if stop:
        serving.tokenizer.require_text("stop")
    return TextRules(
        stop=stop,
        include_stop=fields.include_stop_str_in_output is True,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def _requests(
    template: GenerateRequest, prompts: Sequence[TokenIds], n: int
) -> tuple[GenerateRequest, ...]:
    """One request per choice, in the order of the choices; the seed goes up by one each."""
    pairs = [(prompt, offset) for prompt in prompts for offset in range(n)]
    if len(pairs) == 1:
        return (structs.replace(template, prompt_token_ids=pairs[0][0]),)
    return tuple(
        structs.replace(
            template,
            request_id=f"{template.request_id}-{index}",
            prompt_token_ids=prompt,
            sampling=with_seed_offset(template.sampling, offset),
        )
        for index, (prompt, offset) in enumerate(pairs)
    )
