"""What a model family's way of writing tool calls is to the rest: two markers and a reader."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from engine.api.loose_schema import COERCE_ONE_OF, loosened
from engine.grammar import WHITE_SPACE

Parameters = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments by name of the function."""


def json_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """The Lark rule for a JSON text of a schema."""
    options = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, **COERCE_ONE_OF}
    return f"{rule}: %json {json.dumps({**loosened(schema), 'x-guidance': options})}"


class ToolCall(NamedTuple):
    """A function to call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallSyntax(Protocol):
    """How a family writes calls: text between `start` and the next `end` outside a value."""

    start: str
    end: str

    def rules(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Lark rules: `rule` is a call of `name`, without the markers and their line feeds."""
        ...

    def is_open(self, body: str) -> bool:
        """True if the text after `start` breaks off inside a value."""
        ...

    def parse(self, body: str, parameters: Parameters) -> tuple[ToolCall, ...]:
        """The calls of the text between two markers; none if it is malformed."""
        ...
