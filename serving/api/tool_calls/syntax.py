"""Syntax of a model family's tool calls: markers and a reader."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from serving.api.loose_schema import COERCE_ONE_OF, WHITE_SPACE, loosened

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


class Parsed(NamedTuple):
    """Calls that a text begins with, and the rest of it: all of it where it begins with none."""

    calls: tuple[ToolCall, ...]
    rest: str


class BareCall(NamedTuple):
    """How a call without `start` looks: `start`, a name and `>`, one of `follows`, then `end`."""

    start: str
    follows: tuple[str, ...]
    end: str


class ToolCallSyntax(Protocol):
    """How a family writes calls: text between `start` and the next `end` outside a value.

    `bare` is how models write one that forget `start`; None where that says too little.
    """

    start: str
    end: str
    bare: BareCall | None

    def rules(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Lark rules: `rule` is a call of `name`, without the markers and their line feeds."""
        ...

    def is_open(self, call: str) -> bool:
        """True if the text from `start` on breaks off inside a value."""
        ...

    def parse(self, call: str, parameters: Parameters) -> Parsed:
        """The calls of a text with its markers, of which `end` may be missing."""
        ...
