"""Splits the text of an answer, as it comes, into content and tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from engine.api.tool_calls.syntax import ToolCall, ToolCallSyntax

MAX_INNER_ENDS: Final = 64


@dataclass(slots=True, frozen=True)
class ToolCallRules:
    """How to read the calls of one request; `max_calls` is 1 where they may not be parallel."""

    syntax: ToolCallSyntax
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None


class Reading(NamedTuple):
    """Content that may be shown now, and the calls that are complete."""

    text: str
    calls: tuple[ToolCall, ...]


class ToolCallReader:
    """Reads deltas of any size; their joined readings are those of the whole text.

    A call is shown when its end marker has come, and not in parts: until then it may turn out to be
    malformed, which leaves it content, markers included. End markers inside values are part of
    them. White space alone before, between and
    after calls is dropped.
    """

    __slots__ = (
        *("_body", "_calls", "_held", "_is_text", "_num_calls", "_num_inner"),
        *("_rules", "_space", "_text"),
    )

    def __init__(self, rules: ToolCallRules) -> None:
        self._rules = rules
        self._held = ""  # the end of what has come: it may begin a marker
        self._body: list[str] | None = None  # what came between the markers; None outside
        self._space: list[str] = []
        self._is_text = False  # more than white space since the last call
        self._num_calls = 0
        self._num_inner = 0  # end markers inside values of the present call
        self._text: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def num_calls(self) -> int:
        """Calls read so far, without those beyond `max_calls`."""
        return self._num_calls

    def feed(self, text: str) -> Reading:
        """Add text; returns what it completes."""
        rest: str | None = text
        while rest is not None:
            rest = self._outside(rest) if self._body is None else self._inside(self._body, rest)
        return self._take()

    def flush(self) -> Reading:
        """Return what was held back; a call without its end marker counts if it is complete."""
        if self._body is None:
            self._show(self._held)
        else:
            self._end_call("".join(self._body), "")
        if not self._num_calls:
            self._text += self._space
        self._held, self._space = "", []
        return self._take()

    def _outside(self, text: str) -> str | None:
        """Show text up to a start marker; returns what follows it, None if there is none."""
        start = self._rules.syntax.start
        before, marker, rest = (self._held + text).partition(start)
        if marker:
            self._held, self._body = "", []
            self._show(before)
            return rest
        # before:  0 .. visible: no marker can begin here | visible .. end: held
        visible = len(before) - _overlap(before, start)
        self._held = before[visible:]
        self._show(before[:visible])
        return None

    def _inside(self, body: list[str], text: str) -> str | None:
        """Collect text up to an end marker; returns what follows it, None if there is none."""
        end = self._rules.syntax.end
        # Searched with the few characters before it, since bodies may be long.
        at = (self._held + text).find(end)
        body.append(text)
        if at < 0:
            self._held = (self._held + text)[1 - len(end) :]
            return None
        whole = "".join(body)
        at += len(whole) - len(self._held) - len(text)
        after = at + len(end)
        self._held = ""
        # Looking costs as much as the call is long: an answer of nothing but markers must not.
        if self._num_inner < MAX_INNER_ENDS and self._rules.syntax.is_open(whole[:at]):
            self._num_inner += 1
            self._body = [whole[:after]]
        else:
            self._num_inner = 0
            self._end_call(whole[:at], end)
        return whole[after:]

    def _end_call(self, body: str, end: str) -> None:
        self._body = None
        calls = self._rules.syntax.parse(body, self._rules.parameters)
        if not calls:
            self._show(self._rules.syntax.start + body + end)
            return
        most = self._rules.max_calls
        taken = calls if most is None else calls[: max(0, most - self._num_calls)]
        self._num_calls += len(taken)
        self._calls += taken
        self._space, self._is_text = [], False

    def _show(self, text: str) -> None:
        if not self._is_text and not text.strip():
            self._space.append(text)
            return
        self._text += (*self._space, text)
        self._space, self._is_text = [], True

    def _take(self) -> Reading:
        reading = Reading("".join(self._text), tuple(self._calls))
        self._text, self._calls = [], []
        return reading


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` that begin `marker`."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)
