"""Tool calls in a model's text: read as they come, and forced by a grammar."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

from engine.errors import InvalidRequestError
from engine.types import MAX_GRAMMAR_CHARS
from serving.api.reasoning import overlap
from serving.api.structured_output import closed
from serving.api.tokenizer import Tokenizer
from serving.api.tool_syntaxes import Parameters, ToolCall, ToolCallSyntax, lookup

MAX_INNER_ENDS: Final = 64
MAX_NAME_CHARS: Final = 256  # of a tool

_FENCES: Final = ("```", "~~~")
_PIECE: Final = 4096  # characters


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
    them. White space alone before, between and after calls is dropped. A call of an offered tool
    may lack its start marker on a line of its own that is in no fenced code.
    """

    __slots__ = (
        *("_begun", "_body", "_bare", "_ends", "_held", "_is_text", "_lines", "_num_inner"),
        *("_rules", "_space", "_starts", "_text", "_calls", "_was_bare", "num_calls"),
    )

    def __init__(self, rules: ToolCallRules) -> None:
        start, self._bare = re.escape(rules.syntax.start), rules.syntax.bare
        if self._bare is not None:
            start += f"|{re.escape(self._bare.start)}([^<>\n]{{1,{MAX_NAME_CHARS}}})>"
        self._rules = rules
        self._starts = re.compile(start)
        self._ends: tuple[str, ...] = (rules.syntax.end,)  # of the present call
        self._held = ""  # the end of what has come: it may begin a marker
        self._body: list[str] | None = None  # the present call so far; None outside
        self._begun: str | None = None  # what follows a bare start, until it tells enough
        self._was_bare = False  # an end marker may come that has no start
        self._lines = _Lines()
        self._space: list[str] = []
        self._is_text = False  # more than white space since the last call
        self.num_calls = 0  # without those beyond `max_calls`
        self._num_inner = 0  # end markers inside values of the present call
        self._text: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str, *, ended: bool = False) -> Reading:
        """Add text; returns what it completes, and what was held back if the text has `ended`."""
        self._read(text)
        return self._flush() if ended else self._take()

    def _flush(self) -> Reading:
        """Return what was held back; a call without its end marker counts if it is complete."""
        # What follows a call that was held is read again: each time one call less.
        for _ in range(MAX_INNER_ENDS):
            if self._body is None:
                break
            self._read(self._end_call("".join(self._body)))
        self._show("".join(self._body or ()) or self._held)
        if not self.num_calls:
            self._text += self._space
        self._held, self._body, self._space = "", None, []
        return self._take()

    def _read(self, text: str) -> None:
        # In pieces: what follows a marker is copied, and a text may be nothing but markers.
        todo = _pieces(text)
        while todo:
            piece = todo.pop()
            rest = self._outside(piece) if self._body is None else self._inside(self._body, piece)
            todo += _pieces(rest)

    def _outside(self, text: str) -> str:
        """Show text up to a start marker; returns what follows it, nothing if there is none."""
        text, self._held = self._held + text, ""
        if self._was_bare:
            text = self._without_end(text)
        if not text:
            return ""
        at = 0
        for marker in self._starts.finditer(text):
            self._lines.follow(text[at : marker.start()])
            at = marker.start()
            syntax = self._rules.syntax
            bare = None if marker[0] == syntax.start else self._bare
            is_apart = self._lines.is_blank and not self._lines.is_fenced
            if bare is None or (is_apart and marker[1].strip() in self._rules.parameters):
                self._show(text[:at])
                self._body, self._begun = [marker[0]], None if bare is None else ""
                self._ends = (syntax.end,) if bare is None else (bare.end, syntax.end)
                return text[marker.end() :]
        # text:  0 .. visible: no marker can begin here | visible .. end: held
        visible = len(text) - self._num_possible(text)
        self._held = text[visible:]
        self._lines.follow(text[at:visible])
        self._show(text[:visible])
        return ""

    def _without_end(self, text: str) -> str:
        """Text after a bare call, without the end marker that some models write all the same."""
        end, rest = self._rules.syntax.end, text.lstrip()
        self._was_bare = end.startswith(rest[: len(end)])
        if not self._was_bare:
            return text
        self._show(text[: len(text) - len(rest)])
        if len(rest) < len(end):
            self._held = rest
            return ""
        self._was_bare, self._space = False, []
        return rest[len(end) :]

    def _num_possible(self, text: str) -> int:
        """Characters at the end of a text that may begin a marker."""
        size = overlap(text, self._rules.syntax.start)
        at = text.rfind("<", -MAX_NAME_CHARS - len(self._bare.start)) if self._bare else -1
        if self._bare is None or at < 0:
            return size
        begins = self._bare.start.startswith(text[at : at + len(self._bare.start)])
        is_open = begins and not re.search(r"[>\n]", text[at:])
        return max(size, len(text) - at) if is_open else size

    def _inside(self, body: list[str], text: str) -> str:
        """Collect text up to an end marker; returns what follows it, nothing if there is none."""
        if self._bare is not None and self._begun is not None:
            self._begun = (self._begun + text).lstrip()[:MAX_NAME_CHARS]
            if not any(it.startswith(self._begun[: len(it)]) for it in self._bare.follows):
                # The marker is not that of a call: it is text, and the rest is read as any other.
                start, self._body = "".join(body), None
                self._lines.follow(start)
                self._show(start)
                return text
            if any(self._begun.startswith(it) for it in self._bare.follows):
                self._begun = None
        # Searched with the few characters before it, since bodies may be long.
        searched = self._held + text
        found = [(at, it) for it in self._ends if (at := searched.find(it)) >= 0]
        body.append(text)
        if not found:
            self._held = searched[1 - max(map(len, self._ends)) :]
            return ""
        whole = "".join(body)
        at, end = min(found)
        at += len(whole) - len(searched)
        after = at + len(end)
        self._held = ""
        # Looking costs as much as the call is long: an answer of nothing but markers must not.
        if self._num_inner < MAX_INNER_ENDS and self._rules.syntax.is_open(whole[:at]):
            self._num_inner += 1
            self._body = [whole[:after]]
            return whole[after:]
        return self._end_call(whole[:after]) + whole[after:]

    def _end_call(self, call: str) -> str:
        """Read the call's text; returns what follows the calls in it."""
        self._body, self._held, self._num_inner = None, "", 0
        calls, rest = self._rules.syntax.parse(call, self._rules.parameters)
        if not calls:
            self._lines.follow(call)
            self._show(call)
            return ""
        self._was_bare = not call.startswith(self._rules.syntax.start)
        most = self._rules.max_calls
        taken = calls if most is None else calls[: max(0, most - self.num_calls)]
        self.num_calls += len(taken)
        self._calls += taken
        self._space, self._is_text = [], False
        self._lines.begin()
        return rest

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


class _Lines:
    """Follows content: whether the present line is blank so far, and whether code is fenced."""

    __slots__ = ("_start", "is_fenced")

    def __init__(self) -> None:
        self._start = ""  # of the present line, without its indentation
        self.is_fenced = False

    @property
    def is_blank(self) -> bool:
        return not self._start

    def begin(self) -> None:
        """A new line begins."""
        self._start = ""

    def follow(self, text: str) -> None:
        """Go on with text that is content."""
        first, *others = text.split("\n")
        self._go_on(first)
        for line in others:
            self.begin()
            self._go_on(line)

    def _go_on(self, text: str) -> None:
        if len(self._start) < len(_FENCES[0]):
            self._start = (self._start + text).lstrip()[: len(_FENCES[0])]
            self.is_fenced ^= self._start in _FENCES


def _pieces(text: str) -> list[str]:
    """The text in pieces, the first one last."""
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)][::-1]


def forced_grammar(
    syntax: ToolCallSyntax,
    names: Sequence[str],
    parameters: Parameters,
    *,
    is_parallel: bool,
    tokenizer: Tokenizer,
) -> str:
    """Nothing but calls of `names`, one or, with `is_parallel`, several.

    Markers that are tokens of `tokenizer` are written as these, as the model was trained to.

    Raises InvalidRequestError for a schema that no grammar can be made of, and for a grammar that
    is too large. The node that follows it finds out whether it can be compiled.
    """
    start, end = tokenizer.in_grammar(syntax.start), tokenizer.in_grammar(syntax.end)
    rules = ['start: call ("\\n" call)*' if is_parallel else "start: call"]
    calls = " | ".join(f"tool_{number}" for number in range(len(names)))
    rules.append(f'call: {start} "\\n" ({calls}) "\\n" {end}')
    for number, name in enumerate(names):
        rules += _call_rules(syntax, f"tool_{number}", name, schema=parameters.get(name) or {})
    grammar = str(LLMatcher.grammar_from_lark("\n".join(rules)))
    # Here, where it still has a name: the nodes would only say that a grammar is too long.
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"tools: the grammar of the calls that tool_choice forces has {len(grammar)} "
            f"characters, {MAX_GRAMMAR_CHARS} are allowed: send fewer tools or smaller parameters, "
            "name one tool, or use tool_choice=auto",
            param="tools",
        )
    return grammar


def _call_rules(
    syntax: ToolCallSyntax, rule: str, name: str, *, schema: Mapping[str, Any]
) -> list[str]:
    """Raises InvalidRequestError for what the rules of arguments cannot be made of."""
    properties, required = (lookup(schema, schema, key) for key in ("properties", "required"))
    if not isinstance(properties, dict | None):
        raise _wrong(name, f"have properties={repr(properties)[:80]}: make it an object of schemas")
    is_list = isinstance(required, list) and all(isinstance(it, str) for it in required)
    if required is not None and not is_list:
        raise _wrong(name, f"have required={repr(required)[:80]}: make it an array of names")
    try:
        # As vLLM: a model that may write any key may never end, and no tool asks for that.
        return syntax.rules(rule, name, closed(schema))
    except RecursionError as error:
        raise _wrong(name, "are nested too deeply: flatten them") from error


def _wrong(name: str, told: str) -> InvalidRequestError:
    return InvalidRequestError(f"tools: the parameters of tool {name[:80]!r} {told}", param="tools")
