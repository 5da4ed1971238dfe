"""POST /v1/responses as a chat: types of its body, and their translation. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from engine.errors import InvalidRequestError
from engine.types import MAX_LOGPROBS
from serving.api.json_body import decode_body
from serving.api.plan import Plan, plan_of_chat
from serving.api.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    Function,
    Message,
    SamplingFields,
    TemplateExtras,
    TextPart,
    Tool,
    refuse_untold,
    sampling_fields,
)
from serving.api.served_model import ServedModel
from serving.api.structured_output import JsonSchema, ResponseFormat
from serving.api.turns import Turns
from serving.http.callers import Caller

LOGPROBS: Final = "message.output_text.logprobs"

_Label = Annotated[str, Meta(max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_HISTORY: Final = "nothing is stored here: send the whole history as input items"


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A piece of an item's content: text, or a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Raw = msgspec.field(default_factory=Raw)
    logprobs: Raw = msgspec.field(default_factory=Raw)
    prompt_cache_breakpoint: Raw = msgspec.field(default_factory=Raw)

    def __post_init__(self) -> None:
        """Raise ValueError for anything but text."""
        if self.type not in (*_TEXTS, "refusal"):
            raise ValueError(f"type={self.type[:80]!r}: this model reads text only")
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise ValueError(f"Object missing required field `{name}`")

    @property
    def written(self) -> str:
        return self.refusal or "" if self.type == "refusal" else self.text or ""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One item of `input`: a message, thoughts, a call, or what a call returned.

    One type for all, since a message may leave its `type` out.
    """

    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: Raw = msgspec.field(default_factory=Raw)
    call_id: _Label | None = None
    name: _Name | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    caller: Raw = msgspec.field(default_factory=Raw)
    namespace: Raw = msgspec.field(default_factory=Raw)

    def __post_init__(self) -> None:
        """Raise ValueError for other types and lacking parts; Python in between, as `Message`."""
        needed = _NEEDED.get(self.type)
        if self.type == "item_reference":
            raise ValueError(_HISTORY)
        if needed is None:
            raise ValueError(f"type={self.type[:80]!r} is not served: use {', '.join(_NEEDED)}")
        missing = next((name for name in needed if getattr(self, name) is None), None)
        if missing is not None:
            raise ValueError(f"Object missing required field `{missing}`")


_NEEDED: Final = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class FlatTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `tools`: a function."""

    type: str
    name: _Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Any = None

    def __post_init__(self) -> None:
        """Raise ValueError for tools that a provider would have to run."""
        if self.type != "function":
            raise ValueError(f"type={self.type[:80]!r} is not served: only functions are")
        if self.name is None:
            raise ValueError("Object missing required field `name`")


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text.format`: a schema stands beside its name."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Any = msgspec.field(name="schema", default=None)
    name: _Label | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text`; how verbose an answer is, is left to the model."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`; thoughts are told whole, never as a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses, with vLLM's sampling keys."""

    _SERVED = frozenset({"tools", "tool_choice", "parallel_tool_calls"})

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: TemplateExtras | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Raw = msgspec.field(default_factory=Raw)
    background: bool | None = None
    prompt_cache_options: Any = None

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for what needs a store, or has no place in the reply."""
        super().__post_init__()
        # Raw, since it may be as long as the body.
        has_prompt = bytes(memoryview(self.prompt)[:5]) not in (b"", b"null")
        stored = {"previous_response_id": self.previous_response_id is not None}
        stored |= {"conversation": self.conversation is not None, "prompt": has_prompt}
        for name, is_given in stored.items():
            if is_given:
                raise InvalidRequestError(f"{name} is not supported: {_HISTORY}", param=name)
        if self.background:
            raise InvalidRequestError(
                "background=true is not supported: nothing is stored here; use stream",
                param="background",
            )
        refuse_untold(self, "/v1/responses")


def plan_response(body: bytes, served: ServedModel, caller: Caller) -> Plan:
    """Plan of POST /v1/responses; raises InvalidRequestError leaves."""
    fields = decode_body(body, ResponsesRequest, served.max_model_len, strict=served.strict_api)
    repeated = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": fields.reasoning or Reasoning(),
        "safety_identifier": fields.safety_identifier,
        "text": fields.text or TextConfig(format=TextFormat(type="text")),
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }
    return plan_of_chat(chat_of(fields), served, caller, id_prefix="resp_", repeated=repeated)


def chat_of(fields: ResponsesRequest) -> ChatRequest:
    """The same request as a chat; raises InvalidRequestError for items that do not fit."""
    tools, choice = _tools(fields)
    # Clients send 0 where they want none.
    tells_logprobs = bool(fields.top_logprobs) or LOGPROBS in (fields.include or ())
    # vLLM's own keys are taken beside OpenAI's; where both are given OpenAI's wins.
    most = fields.max_output_tokens
    most = fields.max_completion_tokens if most is None else most
    cut = -1 if fields.truncation == "auto" else fields.truncate_prompt_tokens
    return ChatRequest(
        **{
            **sampling_fields(fields),
            "messages": _messages(fields),
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "response_format": _format(fields.text) or fields.response_format,
            "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
            "max_completion_tokens": most,
            "logprobs": tells_logprobs or None,
            "top_logprobs": fields.top_logprobs,
            "truncate_prompt_tokens": cut,
            "chat_template_kwargs": fields.chat_template_kwargs,
        }
    )


def _format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    asked = text.format
    schema = JsonSchema(schema_=asked.schema_, name=asked.name, strict=asked.strict)
    if asked.type == "json_schema" and asked.schema_ is None:
        raise InvalidRequestError(
            "text.format of type json_schema needs a schema", param="text.format"
        )
    return ResponseFormat(type=asked.type, json_schema=schema)


def _tools(fields: ResponsesRequest) -> tuple[list[Tool], Any]:
    """The tools that are offered, and the choice among them in a chat's words."""
    tools = [
        Tool(
            function=Function(
                name=it.name or "",
                description=it.description,
                parameters=it.parameters,
                strict=it.strict,
            )
        )
        for it in fields.tools or ()
    ]
    match fields.tool_choice:
        case {"type": "function", "name": str(name)}:
            return tools, _nested(name)
        case {"type": "allowed_tools", "tools": [*allowed], **wish}:
            chosen = [_nested(it.get("name")) if isinstance(it, dict) else it for it in allowed]
            mode = wish.get("mode", "auto")
            return tools, {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": chosen},
            }
    return tools, fields.tool_choice


def _nested(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _messages(fields: ResponsesRequest) -> list[Message]:
    turns = Turns(_HISTORY)
    if fields.instructions:
        turns.add(Message(role="system", content=fields.instructions))
    if isinstance(fields.input, str):
        turns.add(Message(role="user", content=fields.input))
    else:
        for index, item in enumerate(fields.input):
            _add(turns, f"input[{index}]", item)
    turns.end_turn()
    return turns.done


def _add(turns: Turns, path: str, item: Item) -> None:
    match item:
        case Item(type="reasoning"):
            turns.think(it.written for it in _parts(item.content) or item.summary or ())
        case Item(type="function_call", name=str(name), call_id=str(call_id)):
            turns.call(name, item.arguments or "", call_id)
        case Item(type="function_call_output", call_id=str(call_id)):
            turns.result(f"{path}.call_id", call_id, _told(item.output))
        case Item(role="assistant"):
            turns.say("".join(it.written for it in _parts(item.content)))
        case _:
            turns.add(Message(role=item.role or "user", content=_told(item.content)))


def _parts(content: str | Sequence[Part] | None) -> Sequence[Part]:
    return [Part(type="text", text=content)] if isinstance(content, str) else content or ()


def _told(content: str | Sequence[Part] | None) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    return [TextPart(text=it.written) for it in content or ()]
