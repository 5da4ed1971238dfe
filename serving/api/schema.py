"""Request bodies of the OpenAI surface, field by field. Knows nothing of tokens, limits or replies.

These types refuse unknown keys; `unknown_keys.py` makes types of them that do not. Keys that OpenAI
and vLLM know and Tandem does not serve are accepted as long as they ask for nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import structlog
from msgspec import UNSET, Meta, Raw, UnsetType

from engine.errors import InvalidRequestError
from engine.types import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_CACHE_BOUNDARIES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    NumTokens,
)
from serving.api.structured_output import GrammarFields

MAX_TOOLS = 512
MAX_CALLS = 256  # of one message
MAX_SHOWN_CHARS = 200  # of a wrong choice
MAX_ARGUMENT_ITEMS = 262_144  # of all calls of a conversation

log = structlog.get_logger()

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Arguments = Annotated[Raw, Meta(extra_json_schema={"type": ["string", "object", "null"]})]
_Label = Annotated[str, Meta(max_length=256)]

_LEAVES_IT_TO_THE_MODEL: tuple[object, ...] = (None, False, "", [], {}, "auto")


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; `parameters` is a JSON schema, `strict` OpenAI's."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `tools`."""

    function: Function
    type: Literal["function"] = "function"

    def __post_init__(self) -> None:
        """Python between any two tools: other threads may go on while all are decoded."""

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it, its keys always in one order."""
        told = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters,
        }
        function = {key: value for key, value in told.items() if value is not None}
        return {"type": self.type, "function": function}


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in the history; `arguments` is JSON text, as in the reply that it came from.

    Some clients send the object itself. It is decoded when the number of its values is known.
    """

    name: _Name
    arguments: _Arguments = msgspec.field(default_factory=Raw)

    def __post_init__(self) -> None:
        """Raise ValueError for arguments of another type."""
        text = bytes(memoryview(self.arguments)[:1])
        if text not in (b"", b'"', b"{", b"n"):
            raise ValueError("Expected `arguments` of type `str | object | null`")

    @classmethod
    def of(cls, name: str, arguments: str) -> Self:
        """A call with arguments as JSON text."""
        return cls(name=name, arguments=Raw(msgspec.json.encode(arguments)))

    def text(self) -> str:
        """The arguments as JSON text, `{}` for none."""
        sent = bytes(memoryview(self.arguments)).decode(errors="replace")
        if not sent.startswith('"'):
            return "{}" if sent in ("", "null") else sent
        try:
            text = msgspec.json.decode(sent, type=str)
        except msgspec.DecodeError:  # half a surrogate pair, which stepping over does not see
            return sent
        return text if text.strip() else "{}"

    def decoded(self) -> dict[str, Any] | None:
        """The arguments as an object; None for a text of anything else."""
        try:
            return msgspec.json.decode(self.text(), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None

    def for_template(self) -> dict[str, Any]:
        """With arguments as an object, which templates take apart; none for a broken text."""
        return {"name": self.name, "arguments": self.decoded() or {}}


class Called(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of an assistant message's `tool_calls`."""

    function: CalledFunction
    id: _Label | None = None
    type: Literal["function"] = "function"
    index: int | None = None

    def __post_init__(self) -> None:
        """Python between any two calls: other threads may go on while all are decoded."""

    def for_template(self) -> dict[str, Any]:
        known_id = {} if self.id is None else {"id": self.id}
        return {**known_id, "type": self.type, "function": self.function.for_template()}


Calls = Annotated[list[Called], Meta(max_length=MAX_CALLS)]


class Offer(NamedTuple):
    """The tools that the model is told of; one of `must_call` is called unless it is empty.

    `is_named`: the caller chose that one by its name, so it is called once.
    """

    tools: Sequence[Tool]
    must_call: tuple[str, ...] = ()
    is_named: bool = False


def offer(tools: Sequence[Tool] | None, choice: object) -> Offer:
    """The meaning of `tools` and `tool_choice`; `"none"` offers none.

    Raises InvalidRequestError for a choice that is none of OpenAI's, or whose tool is not there.
    """
    tools = tools or ()
    names = tuple(tool.function.name for tool in tools)
    if choice == "none":
        return Offer(())
    if choice in _LEAVES_IT_TO_THE_MODEL:
        return Offer(tools)
    if choice == "required" and names:
        return Offer(tools, names)
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": [_, *_] as allowed} as wish}:
            return _allowed(tools, allowed, wish.get("mode", "auto"))
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return Offer(tools, (name,), is_named=True)
    raise InvalidRequestError(
        f"tool_choice={_shown(choice)} names none of tools: use auto, none, "
        'required with tools, or {"type": "function", "function": {"name": ...}} with one of them',
        param="tool_choice",
    )


def _allowed(tools: Sequence[Tool], allowed: Sequence[object], mode: object) -> Offer:
    """OpenAI's `allowed_tools`: some of the tools, of which one is called if `mode` says so."""
    by_name = {tool.function.name: tool for tool in tools}
    chosen: dict[str, Tool] = {}
    for one in allowed:
        match one:
            case {"type": "function", "function": {"name": str(name)}} if name in by_name:
                chosen[name] = by_name[name]
            case _:
                raise InvalidRequestError(
                    f"tool_choice.allowed_tools.tools: {_shown(one)} is none of tools: give "
                    '{"type": "function", "function": {"name": ...}} with one of them',
                    param="tool_choice",
                )
    if mode not in ("auto", "required"):
        raise InvalidRequestError(
            f"tool_choice.allowed_tools.mode={_shown(mode)}: use auto or required",
            param="tool_choice",
        )
    return Offer(tuple(chosen.values()), tuple(chosen) if mode == "required" else ())


def _shown(value: object) -> str:
    """The value, with a mark where it is too long to be told whole."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... (cut)"


def check_arguments(calls: Sequence[Called]) -> None:
    """Raise InvalidRequestError for calls whose arguments would become too many objects.

    Broken ones are logged, in one line: a chat must be able to go on after a call that was cut off.
    """
    texts = [call.function.text() for call in calls]
    # Every value but the first of an object or list follows one of these.
    num_items = sum(text.count(",") + text.count("[") + text.count("{") for text in texts)
    if num_items > MAX_ARGUMENT_ITEMS:
        raise InvalidRequestError(
            f"messages: the arguments of all tool_calls hold {num_items} values: send at most "
            f"{MAX_ARGUMENT_ITEMS}",
            param="messages",
        )
    if num_broken := sum(call.function.decoded() is None for call in calls):
        log.warning(
            "arguments of calls in a history are no JSON objects: {} stands for them",
            num_calls=num_broken,
        )


MAX_CHOICES = 64
MAX_PROMPTS = 64
MAX_SEQUENCES = 128  # of one request; an eighth of what may wait on a node
MAX_STOP_TOKEN_IDS = 256
MAX_MESSAGES = 16_384

_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_TokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
# With an empty one nothing could be generated; vLLM refuses it too.
_AllowedTokenIds = Annotated[list[int], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
_LogitBias = Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIASES)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream; `continuous_usage_stats` is vLLM's."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Labels(GrammarFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels for the caller's own bookkeeping; they change no token.

    `prompt_cache_key`, or else `user`, may choose the nodes, as the header X-Session-ID does.
    """

    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class _Unsupported(_Labels, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that must ask for nothing: null, false, "", [], {} or the value that `_NEUTRAL` adds."""

    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    echo: Any = None
    ec_transfer_params: Any = None
    function_call: Any = None
    functions: Any = None
    guided_decoding_backend: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_embeds: Any = None
    spaces_between_special_tokens: Any = None
    suffix: Any = None
    tool_choice: Any = None
    tools: Any = None
    use_beam_search: Any = None
    verbosity: Any = None
    vllm_xargs: Any = None
    web_search_options: Any = None

    _SERVED = frozenset[str]()  # no field: keys that a kind of request does serve

    def __post_init__(self) -> None:
        """Raise InvalidRequestError that names the first key with a value that matters."""
        for key in _Unsupported.__annotations__:
            value = getattr(self, key)
            if value is None or key in self._SERVED:
                continue
            neutral = (*_EMPTY, *_NEUTRAL.get(key, ()))
            # `==` alone would take 0 for False and 1 for True.
            if not any(type(value) is type(it) and value == it for it in neutral):
                raise InvalidRequestError(
                    f"{key}={repr(value)[:80]} is not supported: leave {key} out", param=key
                )


# Clients send these for keys that they do not use; `_NEUTRAL` adds each key's own default.
_EMPTY: tuple[object, ...] = (False, "", [], {})
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "function_call": ("none", "auto"),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
}


def neutral_values(kind: type[_Unsupported]) -> dict[str, tuple[object, ...]]:
    """The values that ask for nothing, by key, of all keys that `kind` does not serve."""
    keys = _Unsupported.__annotations__.keys() - kind._SERVED
    return {key: (None, *_EMPTY, *_NEUTRAL.get(key, ())) for key in sorted(keys)}


class SamplingFields(_Unsupported, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both generating endpoints; `SamplingParams` has the bounds of sampling values."""

    model: str | None = None
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = (
        None
    )
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: _AllowedTokenIds | None = None
    logit_bias: _LogitBias | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    detokenize: bool | None = None
    bad_words: Annotated[list[_BadWord], Meta(max_length=MAX_BAD_WORDS // 2)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_boundaries: Annotated[list[NumTokens], Meta(max_length=MAX_CACHE_BOUNDARIES)] | None = (
        None
    )
    priority: _Int32 | None = None
    request_id: _Label | None = None
    # Raw: its length is known before it is decoded, and a proxy never decodes it.
    kv_transfer_params: Raw = msgspec.field(default_factory=Raw)


def sampling_fields(fields: SamplingFields) -> dict[str, Any]:
    """The fields that every kind of request has, to make one of another kind."""
    return {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}


def refuse_untold(fields: SamplingFields, path: str) -> None:
    """Raise InvalidRequestError for what has no place in the replies of other protocols."""
    untold = {
        "n": (fields.n or 1) > 1,
        "prompt_logprobs": fields.prompt_logprobs is not None,
        "return_token_ids": fields.return_token_ids,
    }
    for name, is_asked in untold.items():
        if is_asked:
            raise InvalidRequestError(
                f"{name} is not told by {path}: use /v1/chat/completions", param=name
            )


Prompt = str | list[str | int | list[int]]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is one or several texts or lists of token ids."""

    _SERVED = frozenset({"echo"})

    prompt: Prompt
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content parts that a text model takes; an assistant's refusal is text like any other."""

    text: str | None = None
    refusal: str | None = None
    type: Literal["text", "refusal"] = "text"

    def __post_init__(self) -> None:
        """Raise ValueError for a part without its text; Python in between, as in `Message`."""
        if self.written is None:
            raise ValueError(f"Object missing required field `{self.type}`")

    @property
    def written(self) -> str | None:
        return self.text if self.type == "text" else self.refusal


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a chat.

    The keys after `tool_calls` come back from the openai client's own reply objects. A `refusal`
    stands for content that is null; `annotations` are not read.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: _Label | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_call_id: _Label | None = None
    tool_calls: Calls | None = None
    refusal: str | None = None
    annotations: Raw = msgspec.field(default_factory=Raw)
    audio: None = None
    function_call: None = None

    def __post_init__(self) -> None:
        """Raise ValueError for calls and refusals of others than the assistant, and for no text.

        Agents send back assistants' turns that only thought, or said nothing at all.

        It is also Python between two messages: other threads go on while millions are decoded.
        """
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"role={self.role!r} has tool_calls: only the assistant calls tools")
        if self.refusal is not None and self.role != "assistant":
            raise ValueError(f"role={self.role!r} has a refusal: only the assistant refuses")
        if self.content is None and self.role != "assistant":
            # msgspec's own words, which the decoder explains.
            raise ValueError("Object missing required field `content`")

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it; line feeds join text parts, as in vLLM."""
        parts = self.content if self.content is not None else self.refusal or ""
        if not isinstance(parts, str):
            parts = "\n".join(part.written or "" for part in parts)
        extras = {
            "name": self.name,
            # Templates read either name.
            "reasoning_content": self.reasoning_content or self.reasoning,
            "reasoning": self.reasoning or self.reasoning_content,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
        }
        return {
            "role": self.role,
            "content": parts,
            **{key: value for key, value in extras.items() if value is not None},
        }


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
TemplateExtras = Annotated[dict[_Label, Any], Meta(max_length=64)]


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    _SERVED = frozenset(
        {*("tools", "tool_choice", "parallel_tool_calls"), "continue_final_message"}
    )

    messages: Messages
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: _Label | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateExtras | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, with either a prompt or messages; the shape is vLLM's."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateExtras | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
