"""Tool calls written as JSON: {"name": ..., "arguments": {...}}, alone or in a list."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from serving.api.tool_calls.syntax import BareCall, Parameters, Parsed, ToolCall, json_rule

# Possessive throughout: of a string without an end no quote is taken for the start of another.
_UP_TO_OPEN_STRING: Final = re.compile(r'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+', re.S)


class _Call(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: Raw


class JsonCalls:
    """Calls between two markers, such as Hermes' `<tool_call>` and `</tool_call>`."""

    bare: BareCall | None = None

    def __init__(self, start: str, end: str) -> None:
        self.start = start
        self.end = end

    def rules(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """The object, its arguments as the schema says."""
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        return [
            f'{rule}: {opening} {rule}_args "}}"',
            json_rule(f"{rule}_args", {"type": "object", **schema}),
        ]

    def is_open(self, call: str) -> bool:
        return _UP_TO_OPEN_STRING.fullmatch(call) is None

    def parse(self, call: str, parameters: Parameters) -> Parsed:
        """The calls, their arguments as the model wrote them; `parameters` are not needed."""
        try:
            body = call.removeprefix(self.start).removesuffix(self.end)
            found = msgspec.json.decode(body, type=_Call | list[_Call])
            calls = found if isinstance(found, list) else [found]
            made = tuple(ToolCall(it.name, _object(it.arguments)) for it in calls)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            made = ()
        return Parsed(made, "" if made else call)


def _object(arguments: Raw) -> str:
    """Text of a JSON object; some models write it as a JSON string. Raises DecodeError."""
    text = bytes(memoryview(arguments)).decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    msgspec.json.decode(text, type=dict[str, Any])
    return text
