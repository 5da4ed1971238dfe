"""Tools in request bodies: what a chat offers, what it has called, and which choice it leaves."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import structlog
from msgspec import Meta, Raw

from engine.errors import InvalidRequestError

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
    """What `tools` and `tool_choice` mean; `"none"` offers none.

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
