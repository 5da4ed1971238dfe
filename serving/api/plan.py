"""Turns a request's body into sequences to generate and rules for the reply. Pure."""

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType, structs

from engine.errors import (
    InvalidRequestError,
    KVTransferParamsError,
    PromptTooLongError,
    UnknownModelError,
)
from engine.prompt_checks import check_all_prompt_logprobs, check_prompt, check_prompt_logprobs
from engine.types import GenerateRequest, KVTransferParams, RequestOrigin, TokenId
from serving.api.json_body import decode_body, decode_kv_transfer_params
from serving.api.prompt_length import cut_prompts, resolve_max_tokens
from serving.api.reasoning import Thoughts, after_thoughts, marks_are_special, thoughts_of
from serving.api.sampling import check_best_of, sampling_params, with_seed_offset
from serving.api.schema import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
)
from serving.api.serving import Serving
from serving.api.structured_output import grammar_param
from serving.api.tokenizer import Tokenizer
from serving.api.tool_calls.forced import forced_grammar
from serving.api.tool_calls.reader import ToolCallRules
from serving.api.tool_calls.registry import SYNTAXES
from serving.api.tool_calls.syntax import ToolCallSyntax
from serving.api.tool_schema import Tool, check_arguments, offer

COMPLETION_MAX_TOKENS = 16
MAX_SESSION_CHARS = 256

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


def plan_completion(body: bytes, serving: Serving, session_id: str | None = None) -> Plan:
    """Plan of POST /v1/completions; raises InvalidRequestError leaves.

    `session_id`: the caller's header, which wins over the labels in the body.
    """
    fields = decode_body(body, CompletionRequest, serving.max_model_len, strict=serving.strict_api)
    kv_params = _kv_params(fields, serving)
    check_model(fields.model, serving)
    check_best_of(fields)
    is_echo_only = fields.echo is True and fields.max_tokens == 0
    if is_echo_only:
        # The engine ends with a token; P computes it with the prompt, and nobody sees it.
        fields = structs.replace(fields, max_tokens=1)
    prompts = _completion_prompts(fields, serving)
    # As in vLLM: 16 where the key is absent, all the room where it is null.
    default = None if fields.max_tokens is None else COMPLETION_MAX_TOKENS
    plan = _plan(
        fields, prompts, kv_params, serving=serving, default=default, logprobs=fields.logprobs
    )
    if fields.echo:
        echo = _echoed(fields, prompts, serving)
        plan = replace(plan, echo=echo, is_echo_only=is_echo_only)
    return _of_session(plan, session_id, fields)


def plan_chat(body: bytes, serving: Serving, session_id: str | None = None) -> Plan:
    """Plan of POST /v1/chat/completions, as `plan_completion`."""
    fields = decode_body(body, ChatRequest, serving.max_model_len, strict=serving.strict_api)
    return plan_of_chat(fields, serving, session_id)


def plan_of_chat(fields: ChatRequest, serving: Serving, session_id: str | None = None) -> Plan:
    """Plan of a chat, in whichever protocol it was asked for; raises InvalidRequestError leaves."""
    kv_params = _kv_params(fields, serving)
    check_model(fields.model, serving)
    logprobs = _chat_logprobs(fields)
    tools, must_call, is_named = offer(fields.tools, fields.tool_choice)
    prompt = encode_chat(fields, fields.messages, serving, tools=tools)
    default = serving.defaults.max_new_tokens
    plan = _plan(fields, [prompt], kv_params, serving=serving, default=default, logprobs=logprobs)
    # Without a parser a forced call is JSON, whatever the template is: the grammar writes it.
    syntax = serving.tool_calls or (SYNTAXES["hermes"] if must_call else None)
    if tools and syntax is not None and plan.detokenize:
        # As in vLLM: markers are special tokens in some tokenizers and must be seen.
        rules = _tool_call_rules(syntax, tools, parallel=fields.parallel_tool_calls)
        plan = replace(plan, tool_calls=rules, skip_special_tokens=False)
    if must_call:
        plan = _forced_to_call(plan, must_call, is_named=is_named, tokenizer=serving.tokenizer)
    return _of_session(_with_thoughts(plan, fields, serving), session_id, fields)


def _with_thoughts(plan: Plan, fields: ChatRequest, serving: Serving) -> Plan:
    """The plan with thoughts told from the answer, which alone is bound by the grammar."""
    if serving.thoughts is None or not plan.detokenize:
        return plan
    goes_on = _last_text(fields) if fields.continue_final_message is True else None
    thoughts = thoughts_of(serving.thoughts, plan.prompt_of(0), serving.tokenizer, goes_on=goes_on)
    sampling = plan.requests[0].sampling
    if sampling.grammar and not serving.grammar_binds_thoughts:
        plan = _bound_by(plan, after_thoughts(sampling.grammar, thoughts, serving.tokenizer))
    # Marks are special tokens in some tokenizers and must be seen, as those of tool calls.
    return replace(
        plan,
        thoughts=thoughts,
        shows_thoughts=fields.include_reasoning is not False,
        skip_special_tokens=plan.skip_special_tokens
        and not marks_are_special(thoughts, serving.tokenizer),
    )


def _last_text(fields: ChatRequest) -> str:
    return str(fields.messages[-1].for_template()["content"])


def _bound_by(plan: Plan, grammar: str) -> Plan:
    """The plan, of which each answer follows `grammar`."""
    sampling = (structs.replace(it.sampling, grammar=grammar) for it in plan.requests)
    requests = zip(plan.requests, sampling, strict=True)
    return replace(
        plan, requests=tuple(structs.replace(it, sampling=bound) for it, bound in requests)
    )


def _forced_to_call(
    plan: Plan, names: tuple[str, ...], *, is_named: bool, tokenizer: Tokenizer
) -> Plan:
    """The plan with a grammar that allows nothing but calls of these tools."""
    rules = plan.tool_calls
    if rules is None:
        raise InvalidRequestError(
            "a tool_choice that forces a call needs text: leave detokenize out",
            param="tool_choice",
        )
    if plan.requests[0].sampling.grammar:
        raise InvalidRequestError(
            "tool_choice and a grammar both bind the output: give one", param="tool_choice"
        )
    is_parallel = not is_named and rules.max_calls is None
    grammar = forced_grammar(
        rules.syntax, names, rules.parameters, is_parallel=is_parallel, tokenizer=tokenizer
    )
    return replace(_bound_by(plan, grammar), grammar_param="tools")


def _tool_call_rules(
    syntax: ToolCallSyntax, tools: Sequence[Tool], *, parallel: bool | None
) -> ToolCallRules:
    """Without parallel calls only the first one counts, as in vLLM."""
    return ToolCallRules(
        syntax,
        parameters={tool.function.name: tool.function.parameters or {} for tool in tools},
        max_calls=1 if parallel is False else None,
    )


def encode_chat(
    fields: ChatRequest | TokenizeRequest,
    messages: Sequence[Message],
    serving: Serving,
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
    extra = {
        "tools": None,
        **_reasoning(fields, serving),
        **(fields.chat_template_kwargs or {}),
        **offered,
    }
    is_cut = isinstance(fields, ChatRequest) and fields.truncate_prompt_tokens is not None
    return serving.tokenizer.encode_chat(
        [message.for_template() for message in messages],
        add_generation_prompt=fields.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
        extra=extra,
        limit=serving.text_limit(must_fit=not is_cut),
    )


def _reasoning(fields: ChatRequest | TokenizeRequest, serving: Serving) -> dict[str, Any]:
    """Template variables for `reasoning_effort`, as in vLLM; most templates read none.

    Whether to think at all has another name in each family; templates take what they know.
    """
    effort = fields.reasoning_effort if isinstance(fields, ChatRequest) else None
    if effort is None:
        return {}
    switches = {"enable_thinking", "thinking"} & serving.tokenizer.template_names
    return {"reasoning_effort": effort, **dict.fromkeys(switches, effort != "none")}


def _of_session(plan: Plan, session_id: str | None, fields: SamplingFields) -> Plan:
    """The plan with the caller's session on its requests, if there is one."""
    labels = (session_id, fields.prompt_cache_key, fields.user)
    label = next((it for it in labels if isinstance(it, str) and it), None)
    if label is None:
        return plan
    label = label[:MAX_SESSION_CHARS]
    return replace(
        plan, requests=tuple(structs.replace(it, session_id=label) for it in plan.requests)
    )


def of_origin(plan: Plan, origin: RequestOrigin) -> Plan:
    """The plan, of which each request says who sent it."""
    requests = tuple(
        structs.replace(it, origin=structs.replace(origin, num_choices=it.origin.num_choices))
        for it in plan.requests
    )
    return replace(plan, requests=requests)


def named(plan: Plan, prefix: str, label: str) -> Plan:
    """The plan whose reply's id carries the request's X-Request-Id, as in vLLM, if that is plain.

    Nodes know its sequences by ids of their own: two clients may send the same label at once.
    """
    is_plain = _PLAIN_LABEL.fullmatch(label) is not None
    return replace(plan, id=f"{prefix}{label if is_plain else uuid.uuid4().hex}")


def _kv_params(fields: SamplingFields, serving: Serving) -> KVTransferParams | None:
    """None unless accepted: a proxy throws away unread what clients send under that key."""
    if not serving.accept_kv_transfer_params:
        return None
    return decode_kv_transfer_params(fields.kv_transfer_params)


def check_model(name: str | None, serving: Serving) -> None:
    """Raise UnknownModelError unless `name` is served here or not given."""
    if name is not None and name not in serving.served_model_names:
        raise UnknownModelError(
            f"model {name[:256]!r} is not served here: use {serving.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _completion_prompts(fields: CompletionRequest, serving: Serving) -> list[TokenIds]:
    limit = serving.text_limit(must_fit=fields.truncate_prompt_tokens is None)
    encode = partial(
        serving.tokenizer.encode,
        add_special_tokens=fields.add_special_tokens is not False,
        limit=limit,
    )
    prompts = _split_prompts(fields.prompt)
    num_chars = sum(len(it) for it in prompts if isinstance(it, str))
    # A single one is refused by the tokenizer, which knows whether it can fit.
    if len(prompts) > 1 and num_chars > limit.max_chars:
        raise PromptTooLongError(
            f"This model's maximum context length is {serving.max_model_len} tokens. However, your "
            f"{len(prompts)} prompts have {num_chars} characters together: at most "
            f"{limit.max_chars} are taken. Send fewer at once.",
            param="prompt",
            code="context_length_exceeded",
        )
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _echoed(
    fields: CompletionRequest, prompts: Sequence[TokenIds], serving: Serving
) -> tuple[str, ...]:
    """The text of each prompt: as it was sent, unless it was sent as ids or is cut."""
    if fields.detokenize is False:
        return ("",) * len(prompts)
    sent: Sequence[str | TokenIds] = prompts
    if fields.truncate_prompt_tokens is None:
        sent = _split_prompts(fields.prompt)
    decode = partial(
        serving.tokenizer.decode, skip_special_tokens=fields.skip_special_tokens is not False
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
    prompts = cut_prompts(fields, prompts, serving)
    # The engine checks the same at its border; here a proxy refuses before any node computes.
    for prompt in prompts:
        check_prompt(prompt, vocab_size=serving.vocab_size, max_model_len=serving.max_model_len)
    n = fields.n or 1
    _check_num_sequences(n, len(prompts), kv_params)
    remote_decode = kv_params is not None and kv_params.do_remote_decode
    # A PD proxy leaves the client's options beside its own stream=false.
    if fields.stream_options is not None and not fields.stream and not remote_decode:
        raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
    longest = max(map(len, prompts))
    max_tokens = resolve_max_tokens(
        fields, serving, longest, default=default, remote_decode=remote_decode
    )
    sampling = sampling_params(
        fields, serving, max_tokens, logprobs=logprobs, remote_decode=remote_decode
    )
    check_prompt_logprobs(longest, sampling.prompt_logprobs)
    check_all_prompt_logprobs(n * sum(map(len, prompts)), sampling.prompt_logprobs)
    options = fields.stream_options or StreamOptions()
    # A fresh id: whatever the client calls its request stays a label.
    request_id = f"{'chatcmpl' if isinstance(fields, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}"
    # Choices of one prompt lie together: choice i belongs to prompt i // n.
    sequences = [(prompt, offset) for prompt in prompts for offset in range(n)]
    return Plan(
        id=request_id,
        created=int(time.time()),
        model=serving.model_name,
        requests=tuple(
            GenerateRequest(
                request_id=request_id if len(sequences) == 1 else f"{request_id}-{index}",
                prompt_token_ids=prompt,
                sampling=with_seed_offset(sampling, offset) if offset else sampling,
                kv_transfer_params=kv_params,
                cache_salt=fields.cache_salt,
                priority=fields.priority or 0,
                cache_boundaries=tuple(fields.cache_boundaries or ()),
                origin=RequestOrigin(num_choices=0 if offset else n),
            )
            for index, (prompt, offset) in enumerate(sequences)
        ),
        choices_per_prompt=n,
        stop=() if remote_decode else _stop_strings(fields, serving),
        include_stop=fields.include_stop_str_in_output is True,
        skip_special_tokens=fields.skip_special_tokens is not False,
        stream=fields.stream is True,
        include_usage=options.include_usage is True,
        continuous_usage=options.include_usage is True and options.continuous_usage_stats is True,
        return_token_ids=fields.return_token_ids is True,
        prompt_tokens_details=serving.enable_prompt_tokens_details,
        num_prompt_logprobs=fields.prompt_logprobs,
        tokens_as_ids=fields.return_tokens_as_token_ids is True,
        detokenize=fields.detokenize is not False,
        grammar_param=grammar_param(fields) if sampling.grammar else None,
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


def _stop_strings(fields: SamplingFields, serving: Serving) -> tuple[str, ...]:
    """Not for a remote decode: the decoding node sees the same text and stops itself."""
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if stop:
        serving.tokenizer.require_text("stop")
    if stop and fields.detokenize is False:
        raise InvalidRequestError("stop needs text: leave detokenize out", param="stop")
    return stop
