"""POST /v1/messages and its count_tokens as chats: types of their bodies, their translation. Pure.

The protocol is Anthropic's. Blocks that are not text are refused; keys that only a provider's own
services read are accepted and change nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from engine.errors import InvalidRequestError
from engine.types import MAX_STOP_STRINGS
from serving.api.json_body import decode_body
from serving.api.plan import Plan, check_model, encode_chat, plan_of_chat
from serving.api.replies import TokenCount
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
    offer,
    refuse_untold,
    sampling_fields,
)
from serving.api.served_model import ServedModel
from serving.api.structured_output import JsonSchema, ResponseFormat
from serving.api.turns import Turns
from serving.http.callers import Caller

_Label = Annotated[str, Meta(max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_HISTORY: Final = "nothing is stored here: send the whole history as messages"
# Claude Code's first block, which differs from one request to the next: no prefix of it is cached.
_BILLING: Final = "x-anthropic-billing-header"


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A block of a system prompt or of what a tool returned: text."""

    type: str
    text: str | None = None
    cache_control: Raw = msgspec.field(default_factory=Raw)
    citations: Raw = msgspec.field(default_factory=Raw)
    source: Raw = msgspec.field(default_factory=Raw)

    def __post_init__(self) -> None:
        """Raise ValueError for anything but text."""
        if self.type != "text":
            raise ValueError(f"type={self.type[:80]!r}: this model reads text only")
        if self.text is None:
            raise ValueError("Object missing required field `text`")


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One block of a message: text, thoughts, a call, or what a call returned."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: Raw = msgspec.field(default_factory=Raw)
    data: Raw = msgspec.field(default_factory=Raw)
    id: _Label | None = None
    name: _Name | None = None
    # Raw: chat templates read it as JSON text first, within their bounds.
    input: Raw = msgspec.field(default_factory=Raw)
    tool_use_id: _Label | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Raw = msgspec.field(default_factory=Raw)
    citations: Raw = msgspec.field(default_factory=Raw)
    caller: Raw = msgspec.field(default_factory=Raw)
    toolset_name: Raw = msgspec.field(default_factory=Raw)
    source: Raw = msgspec.field(default_factory=Raw)

    def __post_init__(self) -> None:
        """Raise ValueError for other types and lacking parts; Python in between, as `Message`."""
        needed = _NEEDED.get(self.type)
        if needed is None:
            served = ", ".join(_NEEDED)
            raise ValueError(
                f"type={self.type[:80]!r}: this model reads text only, in blocks of {served}"
            )
        missing = next((name for name in needed if getattr(self, name) is None), None)
        if missing is not None:
            raise ValueError(f"Object missing required field `{missing}`")
        if self.type == "tool_use" and bytes(memoryview(self.input)[:1]) != b"{":
            raise ValueError("input must be an object")


_NEEDED: Final = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One entry of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def __post_init__(self) -> None:
        """Raise ValueError for blocks of another role; Python between two turns, as in blocks."""
        if isinstance(self.content, str):
            return
        of_others = _NOT_SAID_BY[self.role]
        wrong = next((it.type for it in self.content if it.type in of_others), None)
        if wrong is not None:
            raise ValueError(f"role={self.role!r} has a block of type {wrong!r}")


_NOT_SAID_BY: Final = {
    "user": ("thinking", "redacted_thinking", "tool_use"),
    "assistant": ("tool_result",),
    "system": ("thinking", "redacted_thinking", "tool_use", "tool_result"),
}


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `tools`: a function of the client's."""

    name: _Name
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None

    def __post_init__(self) -> None:
        """Raise ValueError for tools that a provider would have to run."""
        if self.type not in (None, "custom"):
            raise ValueError(
                f"type={self.type[:80]!r} is not served: give a name and an input_schema alone"
            )


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether tools are called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: _Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks first. No budget: thoughts count among `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The schema that an answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much effort, and in which form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens, with all keys of a message; vLLM's sampling keys too."""

    _SERVED = frozenset({"tools", "tool_choice"})

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: TemplateExtras | None = None
    cache_control: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for what runs elsewhere, or has no place in the reply."""
        super().__post_init__()
        for name in ("container", "mcp_servers"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} is not supported: offer what it runs as tools", param=name
                )
        refuse_untold(self, "/v1/messages")


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: int


def plan_message(body: bytes, served: ServedModel, caller: Caller) -> Plan:
    """Plan of POST /v1/messages; raises InvalidRequestError leaves."""
    fields = decode_body(body, MessagesRequest, served.max_model_len, strict=served.strict_api)
    return plan_of_chat(chat_of(fields), served, caller, id_prefix="msg_")


def count_tokens(served: ServedModel, body: bytes) -> TokenCount:
    """Tokens of the prompt that POST /v1/messages would make of this body.

    They may be more than fit the context. Raises PromptTooLongError for several times its text.
    """
    kind = CountTokensRequest
    fields = decode_body(body, kind, served.max_model_len, strict=served.strict_api)
    check_model(fields.model, served)
    # A prompt that is to be cut may be longer than the context.
    chat = msgspec.structs.replace(chat_of(fields), truncate_prompt_tokens=-1)
    tools = offer(chat.tools, chat.tool_choice).tools
    return TokenCount(input_tokens=len(encode_chat(chat, chat.messages, served, tools=tools)))


def chat_of(fields: CountTokensRequest) -> ChatRequest:
    """The same request as a chat; raises InvalidRequestError for what does not fit together."""
    config = fields.output_config or OutputConfig()
    user_id = fields.metadata.get("user_id") if isinstance(fields.metadata, dict) else None
    choice, thinking = fields.tool_choice, fields.thinking
    messages = _messages(fields)
    # The answer goes on with the assistant's own last text, as Anthropic's does.
    is_prefill = False
    match messages[-1]:
        case Message(role="assistant", tool_calls=None, content=str(text)):
            is_prefill = bool(text)
    # The names under which chat templates ask whether to think; left to them if nobody says.
    switches: dict[str, Any] = {}
    if thinking is not None and thinking.type != "between_tools":
        switches = dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")
    response_format = fields.response_format
    if (schema := config.format or fields.output_format) is not None:
        wrapped = JsonSchema(schema_=schema.schema_)
        response_format = ResponseFormat(type="json_schema", json_schema=wrapped)
    return ChatRequest(
        **{
            **sampling_fields(fields),
            "messages": messages,
            "tools": [_tool(it) for it in fields.tools or ()],
            "tool_choice": _choice(fields),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "stop": fields.stop_sequences or fields.stop,
            "response_format": response_format,
            "reasoning_effort": config.effort,
            "include_reasoning": thinking is None or thinking.display != "omitted",
            "chat_template_kwargs": {**switches, **(fields.chat_template_kwargs or {})},
            "continue_final_message": is_prefill,
            # The label of a session, as OpenAI's clients give it.
            "user": fields.user or user_id,
        }
    )


def _tool(tool: CustomTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(function=function)


def _choice(fields: CountTokensRequest) -> Any:
    """`tool_choice` in a chat's words."""
    match fields.tool_choice:
        case None:
            return None
        case ToolChoice(type="auto" | "none" as plain):
            return plain
        case ToolChoice(type="any") if fields.tools:
            return "required"
        case ToolChoice(type="tool", name=str(name)) if name in {
            tool.name for tool in fields.tools or ()
        }:
            return {"type": "function", "function": {"name": name}}
    raise InvalidRequestError(
        f"tool_choice of type {fields.tool_choice.type!r} names none of tools: use auto, none, any "
        "with tools, or tool with the name of one of them",
        param="tool_choice",
    )


def _messages(fields: CountTokensRequest) -> list[Message]:
    turns = Turns(_HISTORY)
    if isinstance(fields.system, str):
        system: str | list[TextPart] = fields.system
    else:
        texts = [it.text or "" for it in fields.system or ()]
        system = [TextPart(text=it) for it in texts if not it.startswith(_BILLING)]
    if system:
        turns.add(Message(role="system", content=system))
    for index, turn in enumerate(fields.messages):
        _add(turns, f"messages[{index}].content", turn)
    turns.end_turn()
    return turns.done


def _add(turns: Turns, path: str, turn: Turn) -> None:
    blocks = turn.content
    if isinstance(blocks, str):
        blocks = [Block(type="text", text=blocks)]
    match turn:
        case Turn(role="assistant"):
            turns.end_turn()
            turns.think(it.thinking for it in blocks if it.thinking is not None)
            turns.say("".join(it.text for it in blocks if it.text is not None))
            for it in blocks:
                if it.type == "tool_use":
                    arguments = bytes(memoryview(it.input)).decode()
                    turns.call(it.name or "", arguments, it.id or "")
        case _:
            _add_other(turns, path, turn.role, blocks=blocks)


def _add_other(turns: Turns, path: str, role: Any, *, blocks: Sequence[Block]) -> None:
    """Results of calls each in a turn of its own, and the texts between them together in one."""
    texts: list[TextPart] = []
    for index, block in enumerate(blocks):
        if block.tool_use_id is None:
            texts.append(TextPart(text=block.text))
            continue
        if texts:
            turns.add(Message(role=role, content=texts))
            texts = []
        told = block.content or ""
        parts = told if isinstance(told, str) else [TextPart(text=it.text) for it in told]
        turns.result(f"{path}[{index}].tool_use_id", block.tool_use_id, parts)
    if texts or not blocks:
        turns.add(Message(role=role, content=texts))
