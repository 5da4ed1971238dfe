"""POST /v1/responses as a chat: types of its body, and their translation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from engine.api.json_body import decode_body
from engine.api.plan import Plan, plan_of_chat
from engine.api.schema import (
    MAX_MESSAGES,
    ChatRequest,
    Message,
    SamplingFields,
    TemplateExtras,
    TextPart,
)
from engine.api.serving import Serving
from engine.api.structured_output import JsonSchema, ResponseFormat
from engine.api.tool_schema import MAX_TOOLS, Called, CalledFunction, Function, Tool
from engine.errors import InvalidRequestError
from engine.types import MAX_LOGPROBS

LOGPROBS: Final = "message.output_text.logprobs"

_Label = Annotated[str, Meta(max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_HISTORY: Final = "nothing is stored here: send the whole history as input items"


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of an item's content: text, or a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Raw = msgspec.field(default_factory=Raw)
    logprobs: Raw = msgspec.field(default_factory=Raw)
    prompt_cache_breakpoint: Any = None

    def __post_init__(self) -> None:
        """Raise ValueError for anything but text."""
        if self.type not in (*_TEXTS, "refusal"):
            raise ValueError(f"type={self.type[:80]!r}: this model reads text only")
        if (self.refusal if self.type == "refusal" else self.text) is None:
            name = "refusal" if self.type == "refusal" else "text"
            raise ValueError(f"Object missing required field `{name}`")

    @property
    def written(self) -> str:
        return self.refusal or "" if self.type == "refusal" else self.text or ""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    caller: Any = None
    namespace: Any = None

    def __post_init__(self) -> None:
        """Raise ValueError for other types and for items without their parts.

        It is also Python between two items: other threads go on while millions are decoded.
        """
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
    prompt: Any = None
    background: bool | None = None
    prompt_cache_options: Any = None

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for what needs a store, or has no place in the reply."""
        super().__post_init__()
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"{name} is not supported: {_HISTORY}", param=name)
        if self.background:
            raise InvalidRequestError(
                "background=true is not supported: nothing is stored here; use stream",
                param="background",
            )
        untold = {
            "n": (self.n or 1) > 1,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "return_token_ids": self.return_token_ids,
        }
        for name, is_asked in untold.items():
            if is_asked:
                raise InvalidRequestError(
                    f"{name} is not told by /v1/responses: use /v1/chat/completions", param=name
                )


def plan_response(body: bytes, serving: Serving, session_id: str | None = None) -> Plan:
    """Plan of POST /v1/responses; raises InvalidRequestError leaves."""
    fields = decode_body(body, ResponsesRequest, serving.max_model_len, strict=serving.strict_api)
    plan = plan_of_chat(chat_of(fields), serving, session_id)
    sampling = plan.requests[0].sampling
    repeated = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": fields.reasoning or Reasoning(),
        "safety_identifier": fields.safety_identifier,
        "temperature": sampling.temperature,
        "text": fields.text or TextConfig(format=TextFormat(type="text")),
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }
    return replace(plan, repeated=repeated)


def chat_of(fields: ResponsesRequest) -> ChatRequest:
    """The same request as a chat; raises InvalidRequestError for items that do not fit."""
    shared = {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}
    tools, choice = _tools(fields)
    # Clients send 0 where they want none.
    tells_logprobs = bool(fields.top_logprobs) or LOGPROBS in (fields.include or ())
    # vLLM's own keys are taken beside OpenAI's; where both are given OpenAI's wins.
    most = fields.max_output_tokens
    most = fields.max_completion_tokens if most is None else most
    cut = -1 if fields.truncation == "auto" else fields.truncate_prompt_tokens
    return ChatRequest(
        **{
            **shared,
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
            return tools, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            names = [it.get("name") if isinstance(it, dict) else None for it in allowed]
            known = {tool.function.name for tool in tools}
            if not names or not all(isinstance(it, str) and it in known for it in names):
                raise InvalidRequestError(
                    f"tool_choice.tools={repr(names)[:80]} names other functions than tools",
                    param="tool_choice",
                )
            return [tool for tool in tools if tool.function.name in names], mode
    return tools, fields.tool_choice


@dataclass(slots=True)
class _Turns:
    """Messages in the making: thoughts, text and calls of one assistant turn are one message."""

    done: list[Message] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    content: str | None = None
    calls: list[Called] = field(default_factory=list)
    known_calls: set[str] = field(default_factory=set)

    def add(self, path: str, item: Item) -> None:
        """Take the next item; `path` is its place in the body."""
        match item:
            case Item(type="reasoning"):
                self._next_step()
                self.thoughts += [it.written for it in _parts(item.content) or item.summary or ()]
            case Item(type="function_call"):
                function = CalledFunction(name=item.name or "", arguments=item.arguments or "")
                self.calls.append(Called(function=function, id=item.call_id))
                self.known_calls.add(item.call_id or "")
            case Item(type="function_call_output"):
                self.end_turn()
                self._check_known(path, item.call_id)
                told = _told(item.output)
                self.done.append(Message(role="tool", content=told, tool_call_id=item.call_id))
            case Item(role="assistant"):
                self._next_step()
                self.content = "".join(it.written for it in _parts(item.content))
            case _:
                self.end_turn()
                self.done.append(Message(role=item.role or "user", content=_told(item.content)))

    def _check_known(self, path: str, call_id: str | None) -> None:
        # A result without its call: the client left out items that it thinks are stored.
        if call_id not in self.known_calls:
            raise InvalidRequestError(
                f"{path}.call_id={call_id!r}: no function_call before it has this id; {_HISTORY}",
                param=f"{path}.call_id",
            )

    def _next_step(self) -> None:
        """End the turn before thoughts or text that cannot belong to it."""
        # One turn of a template: thoughts, then text, then calls.
        if self.content is not None or self.calls:
            self.end_turn()

    def end_turn(self) -> None:
        """Close the assistant's turn, if one is open."""
        if self.content is not None or self.calls or self.thoughts:
            self.done.append(
                Message(
                    role="assistant",
                    content=self.content or "",
                    reasoning_content="\n".join(self.thoughts) or None,
                    tool_calls=self.calls or None,
                )
            )
        self.thoughts, self.content, self.calls = [], None, []


def _messages(fields: ResponsesRequest) -> list[Message]:
    turns = _Turns()
    if fields.instructions:
        turns.done.append(Message(role="system", content=fields.instructions))
    if isinstance(fields.input, str):
        turns.done.append(Message(role="user", content=fields.input))
    else:
        for index, item in enumerate(fields.input):
            turns.add(f"input[{index}]", item)
    turns.end_turn()
    return turns.done


def _parts(content: str | Sequence[Part] | None) -> Sequence[Part]:
    return [Part(type="text", text=content)] if isinstance(content, str) else content or ()


def _told(content: str | Sequence[Part] | None) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    return [TextPart(text=it.written) for it in content or ()]
