"""Turns a request's body into sequences to generate and rules for the reply. Pure."""

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from msgspec import UNSET, UnsetType, structs

from engine.errors import (
    InvalidRequestError,
    KVTransferParamsError,
    PromptTooLongError,
    UnknownModelError,
)
from engine.prompt_checks import check_all_prompt_logprobs, check_prompt, check_prompt_logprobs
from engine.types import GenerateRequest, KVTransferParams, SamplingParams, TokenId
from serving.api.json_body import decode_body, decode_kv_transfer_params
from serving.api.reasoning import Thoughts, after_thoughts, marks_are_special, thoughts_of
from serving.api.sampling import (
    asked_grammar,
    check_best_of,
    cut_prompts,
    resolve_max_tokens,
    sampling_params,
    with_seed_offset,
)
from serving.api.schema import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
    Tool,
    check_arguments,
    offer,
)
from serving.api.served_model import ServedModel
from serving.api.structured_output import grammar_param
from serving.api.tool_calls import ToolCallRules, forced_grammar
from serving.api.tool_syntaxes import SYNTAXES
from serving.http.callers import Caller

COMPLETION_MAX_TOKENS = 16
MAX_SESSION_CHARS = 256
NOBODY: Final = Caller()

TokenIds = tuple[TokenId, ...]
_PLAIN_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True, frozen=True)
class Plan:
    """One HTTP request: `requests[i]` makes choice i from prompt `i // choices_per_prompt`.

    `id` is that of the reply; `requests` have their own. `repeated`: fields that the reply shows.
    `hides_cache`: nothing in the reply tells how much of a prompt was cached.
    `echo`: the text of each prompt, which its choices repeat; with `is_echo_only` they hold no more
    than that, and their one token is thrown away. `num_prompt_logprobs`: alternatives that are
    shown of each token of a prompt. `thoughts`: how they are told from the answer; clients get them
    where `shows_thoughts`.
    """

    id: str
    created: int
    model: str
    requests: tuple[GenerateRequest, ...]
    choices_per_prompt: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    prompt_tokens_details: bool
    tool_calls: ToolCallRules | None = None
    thoughts: Thoughts | None = None
    shows_thoughts: bool = True
    hides_cache: bool = False
    echo: tuple[str, ...] = ()
    is_echo_only: bool = False
    num_prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    detokenize: bool = True
    grammar_param: str | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)

    def echo_of(self, choice: int) -> str:
        """The text that comes before the choice's own."""
        return self.echo[choice // self.choices_per_prompt] if self.echo else ""

    def prompt_of(self, choice: int) -> TokenIds:
        return self.requests[choice].prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; one with several choices counts once."""
        firsts = self.requests[:: self.choices_per_prompt]
        return sum(len(request.prompt_token_ids) for request in firsts)

    def envelope(
        self, kind: str, kv_params: KVTransferParams | UnsetType | None = None
    ) -> dict[str, Any]:
        """The fields that every reply and chunk of a request repeats."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "kv_transfer_params": kv_params or UNSET,
        }

    @property
    def tells_cache(self) -> bool:
        """True where the reply may tell how much of the prompt was cached."""
        return self.prompt_tokens_details and not self.hides_cache

    @property
    def is_own_hand_over(self) -> bool:
        """True where the caller hands over itself, under a salt: no prefix of others can hit."""
        first = self.requests[0]
        return first.kv_transfer_params is not None and first.cache_salt is not None

    def if_asked(self, token_ids: TokenIds) -> TokenIds | UnsetType:
        """Token ids for a caller that set `return_token_ids`."""
        return token_ids if self.return_token_ids else UNSET


@dataclass(slots=True, frozen=True)
class _Wanted:
    """The part of a plan that its protocol computes; `shows_special_tokens` if anybody asks."""

    id_prefix: str
    prompts: Sequence[TokenIds]
    default_max_tokens: int | None
    logprobs: int | None
    grammar: str
    shows_special_tokens: bool = False


def plan_completion(body: bytes, served: ServedModel, caller: Caller = NOBODY) -> Plan:
    """Plan of POST /v1/completions; raises InvalidRequestError leaves."""
    fields = decode_body(body, CompletionRequest, served.max_model_len, strict=served.strict_api)
    check_model(fields.model, served)
    check_best_of(fields)
    is_echo_only = bool(fields.echo) and fields.max_tokens == 0
    if is_echo_only:
        # The engine ends with a token; P computes it with the prompt, and nobody sees it.
        fields = structs.replace(fields, max_tokens=1)
    texts = _completion_prompts(fields, served)
    wanted = _Wanted(
        "cmpl-",
        cut_prompts(fields, texts, served),
        # As in vLLM: 16 where the key is absent, all the room where it is null.
        default_max_tokens=None if fields.max_tokens is None else COMPLETION_MAX_TOKENS,
        logprobs=fields.logprobs,
        grammar=asked_grammar(fields, served),
    )
    echo = _echoed(fields, texts, served) if fields.echo else ()
    plan = _plan(fields, wanted, caller, served=served)
    return replace(plan, grammar_param=grammar_param(fields), echo=echo, is_echo_only=is_echo_only)


def plan_chat(body: bytes, served: ServedModel, caller: Caller = NOBODY) -> Plan:
    """Plan of POST /v1/chat/completions, as `plan_completion`."""
    fields = decode_body(body, ChatRequest, served.max_model_len, strict=served.strict_api)
    return plan_of_chat(fields, served, caller)


def plan_of_chat(
    fields: ChatRequest,
    served: ServedModel,
    caller: Caller,
    *,
    id_prefix: str = "chatcmpl-",
    repeated: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Plan of a chat, in whichever protocol it was asked for; raises InvalidRequestError leaves."""
    check_model(fields.model, served)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequestError(
            f"top_logprobs={fields.top_logprobs} needs logprobs=true", param="top_logprobs"
        )
    tools, must_call, is_named = offer(fields.tools, fields.tool_choice)
    (prompt,) = cut_prompts(
        fields, [encode_chat(fields, fields.messages, served, tools=tools)], served
    )
    reads_text = fields.detokenize is not False
    # Without a parser a forced call is JSON, whatever the template is: the grammar writes it.
    syntax = served.tool_calls or (SYNTAXES["hermes"] if must_call else None)
    rules = thoughts = None
    if tools and syntax is not None and reads_text:
        # Without parallel calls only the first one counts, as in vLLM.
        rules = ToolCallRules(
            syntax,
            parameters={tool.function.name: tool.function.parameters or {} for tool in tools},
            max_calls=1 if fields.parallel_tool_calls is False else None,
        )
    grammar, param = asked_grammar(fields, served), grammar_param(fields)
    if must_call:
        grammar = _forced_calls(grammar, rules, must_call, is_named=is_named, served=served)
        param = "tools"
    marks_are_shown = False
    if served.thoughts is not None and reads_text:
        last = fields.messages[-1]
        goes_on = str(last.for_template()["content"]) if fields.continue_final_message else None
        thoughts = thoughts_of(served.thoughts, prompt, served.tokenizer, goes_on=goes_on)
        marks_are_shown = marks_are_special(thoughts, served.tokenizer)
        if grammar and not served.grammar_binds_thoughts:
            grammar = after_thoughts(grammar, thoughts, served.tokenizer)
    wanted = _Wanted(
        id_prefix,
        [prompt],
        default_max_tokens=served.defaults.max_new_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        grammar=grammar,
        # As in vLLM: markers are special tokens in some tokenizers and must be seen.
        shows_special_tokens=rules is not None or marks_are_shown,
    )
    return replace(
        _plan(fields, wanted, caller, served=served),
        grammar_param=param,
        tool_calls=rules,
        thoughts=thoughts,
        shows_thoughts=fields.include_reasoning is not False,
        repeated=repeated,
    )


def _forced_calls(
    grammar: str,
    rules: ToolCallRules | None,
    names: tuple[str, ...],
    *,
    is_named: bool,
    served: ServedModel,
) -> str:
    """The grammar that allows nothing but calls of these tools."""
    if rules is None:
        raise InvalidRequestError(
            "a tool_choice that forces a call needs text: leave detokenize out", param="tool_choice"
        )
    if grammar:
        raise InvalidRequestError(
            "tool_choice and a grammar both bind the output: give one", param="tool_choice"
        )
    is_parallel = not is_named and rules.max_calls is None
    return forced_grammar(
        rules.syntax, names, rules.parameters, is_parallel=is_parallel, tokenizer=served.tokenizer
    )


def encode_chat(
    fields: ChatRequest | TokenizeRequest,
    messages: Sequence[Message],
    served: ServedModel,
    *,
    tools: Sequence[Tool],
) -> TokenIds:
    """Token ids of a conversation, by the model's chat template."""
    check_arguments([call for message in messages for call in message.tool_calls or ()])
    # As in transformers the name is always there: templates test it in several ways.
    offered = {"tools": [tool.for_template() for tool in tools]} if tools else {}
    goes_on = fields.continue_final_message is True
    if goes_on and fields.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: give one",
            param="continue_final_message",
        )
    extra: dict[str, Any] = {"tools": None}
    if isinstance(fields, ChatRequest) and (effort := fields.reasoning_effort) is not None:
        # As in vLLM. Whether to think at all has another name in each family's template.
        switches = {"enable_thinking", "thinking"} & served.tokenizer.template_names
        extra |= {"reasoning_effort": effort, **dict.fromkeys(switches, effort != "none")}
    extra |= {**(fields.chat_template_kwargs or {}), **offered}
    is_cut = isinstance(fields, ChatRequest) and fields.truncate_prompt_tokens is not None
    return served.tokenizer.encode_chat(
        [message.for_template() for message in messages],
        add_generation_prompt=fields.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
        extra=extra,
        limit=served.text_limit(must_fit=not is_cut),
    )


def check_model(name: str | None, served: ServedModel) -> None:
    """Raise UnknownModelError unless `name` is served here or not given."""
    if name is not None and name not in served.served_model_names:
        raise UnknownModelError(
            f"model {name[:256]!r} is not served here: use {served.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _completion_prompts(fields: CompletionRequest, served: ServedModel) -> list[TokenIds]:
    limit = served.text_limit(must_fit=fields.truncate_prompt_tokens is None)
    encode = partial(
        served.tokenizer.encode,
        add_special_tokens=fields.add_special_tokens is not False,
        limit=limit,
    )
    prompts = _split_prompts(fields.prompt)
    num_chars = sum(len(it) for it in prompts if isinstance(it, str))
    # A single one is refused by the tokenizer, which knows whether it can fit.
    if len(prompts) > 1 and num_chars > limit.max_chars:
        raise PromptTooLongError(
            f"This model's maximum context length is {served.max_model_len} tokens. However, your "
            f"{len(prompts)} prompts have {num_chars} characters together: at most "
            f"{limit.max_chars} are taken. Send fewer at once.",
            param="prompt",
            code="context_length_exceeded",
        )
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _echoed(
    fields: CompletionRequest, prompts: Sequence[TokenIds], served: ServedModel
) -> tuple[str, ...]:
    """The text of each prompt: as it was sent, unless it was sent as ids or is cut."""
    if fields.detokenize is False:
        return ("",) * len(prompts)
    sent: Sequence[str | TokenIds] = prompts
    if fields.truncate_prompt_tokens is None:
        sent = _split_prompts(fields.prompt)
    decode = partial(
        served.tokenizer.decode, skip_special_tokens=fields.skip_special_tokens is not False
    )
    return tuple(it if isinstance(it, str) else decode(it) for it in sent)


def _split_prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | TokenIds]:
    """One entry per prompt; a flat list of ids is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    # One list of numbers is one prompt; anything else is one prompt per item. A sum is the quickest
    # way to see that all of a long list are numbers.
    with suppress(TypeError):
        sum(prompt)  # type: ignore[arg-type]
        return [tuple(prompt)]  # type: ignore[arg-type]
    if any(isinstance(item, int) for item in prompt):
        raise InvalidRequestError("prompt mixes token ids with texts or lists", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are accepted",
            param="prompt",
        )
    return [tuple(item) if isinstance(item, list) else str(item) for item in prompt]


def _plan(fields: SamplingFields, wanted: _Wanted, caller: Caller, *, served: ServedModel) -> Plan:
    prompts, n, kv_params = wanted.prompts, fields.n or 1, None
    if served.accept_kv_transfer_params:  # a proxy throws away unread what clients send there
        kv_params = decode_kv_transfer_params(fields.kv_transfer_params)
    # The engine checks the same at its border; here a proxy refuses before any node computes.
    for prompt in prompts:
        check_prompt(prompt, vocab_size=served.vocab_size, max_model_len=served.max_model_len)
    _check_num_sequences(n, len(prompts), kv_params)
    remote_decode = kv_params is not None and kv_params.do_remote_decode
    # A PD proxy leaves the client's options beside its own stream=false.
    if fields.stream_options is not None and not fields.stream and not remote_decode:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
    options = fields.stream_options or StreamOptions()
    longest = max(map(len, prompts))
    max_tokens = resolve_max_tokens(
        fields, served, longest, default=wanted.default_max_tokens, remote_decode=remote_decode
    )
    sampling = sampling_params(
        fields,
        served,
        max_tokens,
        logprobs=wanted.logprobs,
        grammar=wanted.grammar,
        remote_decode=remote_decode,
    )
    check_prompt_logprobs(longest, sampling.prompt_logprobs)
    check_all_prompt_logprobs(n * sum(map(len, prompts)), sampling.prompt_logprobs)
    # A fresh id: whatever the client calls its request stays a label, and two may use the same.
    request_id = f"{wanted.id_prefix}{uuid.uuid4().hex}"
    is_plain = _PLAIN_LABEL.fullmatch(caller.label) is not None
    return Plan(
        id=f"{wanted.id_prefix}{caller.label}" if is_plain else request_id,
        created=int(time.time()),
        model=served.model_name,
        requests=_requests(
            fields, prompts, caller, request_id=request_id, sampling=sampling, kv_params=kv_params
        ),
        choices_per_prompt=n,
        stop=() if remote_decode else _stop_strings(fields, served),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=not wanted.shows_special_tokens
        and fields.skip_special_tokens is not False,
        stream=bool(fields.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        prompt_tokens_details=served.enable_prompt_tokens_details,
        hides_cache=caller.terms.hides_cached_tokens,
        num_prompt_logprobs=fields.prompt_logprobs,
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        detokenize=fields.detokenize is not False,
    )


def _requests(
    fields: SamplingFields,
    prompts: Sequence[TokenIds],
    caller: Caller,
    *,
    request_id: str,
    sampling: SamplingParams,
    kv_params: KVTransferParams | None,
) -> tuple[GenerateRequest, ...]:
    """The one place where requests are built. Choices of one prompt lie together."""
    n = fields.n or 1
    sequences = [(prompt, offset) for prompt in prompts for offset in range(n)]
    # The header's label, else one of the body's.
    labels = (caller.session_id, fields.prompt_cache_key, fields.user)
    session_id = next((it for it in labels if isinstance(it, str) and it), None)
    return tuple(
        GenerateRequest(
            request_id=request_id if len(sequences) == 1 else f"{request_id}-{index}",
            prompt_token_ids=prompt,
            sampling=with_seed_offset(sampling, offset) if offset else sampling,
            kv_transfer_params=kv_params,
            cache_salt=caller.cache_salt(fields.cache_salt),
            priority=caller.priority(fields.priority or 0),
            session_id=session_id and session_id[:MAX_SESSION_CHARS],
            tenant=caller.tenant,
            cache_boundaries=tuple(fields.cache_boundaries or ()),
            origin=caller.origin(num_choices=0 if offset else n),
        )
        for index, (prompt, offset) in enumerate(sequences)
    )


def _check_num_sequences(n: int, prompts: int, kv_params: KVTransferParams | None) -> None:
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


def _stop_strings(fields: SamplingFields, served: ServedModel) -> tuple[str, ...]:
    """Not for a remote decode: the decoding node sees the same text and stops itself."""
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if stop:
        served.tokenizer.require_text("stop")
    if stop and fields.detokenize is False:
        raise InvalidRequestError("stop needs text: leave detokenize out", param="stop")
    return stop
