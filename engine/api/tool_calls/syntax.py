"""What a model family's way of writing tool calls is to the rest: two markers and a reader."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

Parameters = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments by name of the function."""


class ToolCall(NamedTuple):
    """A function to call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallSyntax(Protocol):
    """How a family writes calls: text between `start` and the next `end`."""

    start: str
    end: str

    def parse(self, body: str, parameters: Parameters) -> tuple[ToolCall, ...]:
        """The calls of the text between two markers; none if it is malformed."""
        ...
