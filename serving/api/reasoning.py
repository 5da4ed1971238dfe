"""Thoughts of a model: how families mark them, and how text and grammars are split at the marks.

    prompt ... <think>\n | thoughts ............ </think> | \n\n answer, tool calls
                         ^ the output begins here, or at <think>, or after </think>

Which of the three it is, the end of the prompt tells: chat templates open the block, leave it to
the model, or close it for a request without thinking. A user's text cannot: the template's own
words always follow it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from engine.errors import InvalidRequestError
from engine.types import MAX_GRAMMAR_CHARS, TokenId
from serving.api.tokenizer import Tokenizer
from serving.config import ReasoningParser

_END_OF_PROMPT: Final = 32
"""Tokens of a prompt that are looked at: more than any family's mark and the white space after."""


@dataclass(slots=True, frozen=True)
class ThoughtSyntax:
    """A family's marks, each in the spellings that occur.

    `is_always_open`: the output begins with thoughts unless the prompt has closed them.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_always_open: bool = False


_TAGS = ThoughtSyntax(("<think>",), ("</think>",))
_OPEN_TAGS = ThoughtSyntax(("<think>",), ("</think>",), is_always_open=True)
_GRANITE = ThoughtSyntax(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)

SYNTAXES: Final[Mapping[ReasoningParser, ThoughtSyntax | None]] = {
    "none": None,
    "qwen3": _TAGS,
    "deepseek_r1": _OPEN_TAGS,
    "nemotron_v3": _OPEN_TAGS,
    "granite": _GRANITE,
}
"""By the names of vLLM's parsers."""


def choose_thoughts(name: ReasoningParser, tokenizer: Tokenizer) -> ThoughtSyntax | None:
    """The syntax of that name; with `auto` of the chat template, else of the tokens, if any."""
    if name != "auto":
        return SYNTAXES[name]
    template = tokenizer.chat_template or ""
    has_tokens = tokenizer.added_token("</think>") is not None
    if has_tokens or "<think>" in template or "</think>" in template:
        return _TAGS
    return _GRANITE if "my thought process" in template else None


class Phase(Enum):
    """Where an output is: it may open thoughts, it is in them, or they are over."""

    MAY_OPEN = auto()
    THINKING = auto()
    OVER = auto()


class Thoughts(NamedTuple):
    """How to read one request's output, and where it begins."""

    syntax: ThoughtSyntax
    begins: Phase


def thoughts_of(
    syntax: ThoughtSyntax, prompt: Sequence[TokenId], tokenizer: Tokenizer, *, goes_on: str | None
) -> Thoughts:
    """Phase and marks with which the output after `prompt` begins.

    `goes_on`: the text of the last message, where the output continues it.
    """
    end = tokenizer.decode(prompt[-_END_OF_PROMPT:], skip_special_tokens=False)
    if goes_on:
        opened = max(goes_on.rfind(mark) for mark in syntax.starts)
        closed = max(goes_on.rfind(mark) for mark in syntax.ends)
        if max(opened, closed) >= 0:
            return Thoughts(syntax, Phase.THINKING if opened > closed else Phase.OVER)
    if end.rstrip().endswith(syntax.ends):
        return Thoughts(syntax, Phase.OVER)
    if end.rstrip().endswith(syntax.starts) or syntax.is_always_open:
        return Thoughts(syntax, Phase.THINKING)
    return Thoughts(syntax, Phase.MAY_OPEN)


class Split(NamedTuple):
    """Text that may be shown now: what was thought, and what comes after the thoughts."""

    thoughts: str
    answer: str


class ThoughtReader:
    """Reads deltas of any size; their joined splits are that of the whole text.

    Marks are left out, and so are the line feeds that templates write around thoughts. Thoughts
    that never end are thoughts to the end.
    """

    __slots__ = ("_held", "_is_new", "_num_feeds", "_space", "_syntax", "phase")

    def __init__(self, thoughts: Thoughts) -> None:
        self._syntax = thoughts.syntax
        self.phase = thoughts.begins
        self._held = ""  # may begin a mark
        self._space: list[str] = []  # before a mark that may open the thoughts
        self._num_feeds = 0  # line feeds at the end of the thoughts so far: perhaps their last
        self._is_new = self.phase is Phase.THINKING  # the line feeds that come next are left out

    def feed(self, text: str, *, ended: bool = False) -> Split:
        """Add text; returns what it settles, and what was held back if the text has `ended`."""
        thoughts, text = "", self._held + text
        self._held = ""
        if self.phase is Phase.MAY_OPEN:
            text = self._opened(text)
        if self.phase is Phase.THINKING:
            thoughts, text = self._thought(text)
        if self._is_new and self.phase is Phase.OVER:
            text = text.lstrip("\n")
            self._is_new = not text
        last = self._flush() if ended else Split("", "")
        return Split(thoughts + last.thoughts, text + last.answer)

    def _flush(self) -> Split:
        """Return what was held back: the text has ended."""
        held, self._held = self._held, ""
        if self.phase is Phase.THINKING:
            return Split(self._shown(held), "")
        return Split("", "".join(self._space) + held)

    def _opened(self, text: str) -> str:
        """Text after the opening mark; the text itself where there is none, else nothing yet."""
        start = text.lstrip()
        mark = next((mark for mark in self._syntax.starts if start.startswith(mark)), None)
        if mark is not None:
            self.phase, self._is_new, self._space = Phase.THINKING, True, []
            return start[len(mark) :]
        # Kept apart: an output may be nothing but white space.
        self._space.append(text[: len(text) - len(start)])
        if any(mark.startswith(start) for mark in self._syntax.starts):
            self._held = start
            return ""
        self.phase = Phase.OVER
        space, self._space = self._space, []
        return "".join(space) + start

    def _thought(self, text: str) -> Split:
        found = [(at, mark) for mark in self._syntax.ends if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            thoughts = self._shown(text[:at].rstrip("\n"))
            self.phase, self._is_new, self._num_feeds = Phase.OVER, True, 0
            return Split(thoughts, text[at + len(mark) :])
        # text:  0 .. visible: no mark can begin here | visible .. end: held
        visible = len(text) - max(overlap(text, mark) for mark in self._syntax.ends)
        self._held = text[visible:]
        return Split(self._shown(text[:visible]), "")

    def _shown(self, text: str) -> str:
        """The text as thoughts, line feeds at its end kept for the text that follows them."""
        if self._is_new:
            text = text.lstrip("\n")
        bare = text.rstrip("\n")
        if not bare:
            self._num_feeds += len(text)
            return ""
        shown = "\n" * self._num_feeds + bare
        self._is_new, self._num_feeds = False, len(text) - len(bare)
        return shown


def marks_are_special(thoughts: Thoughts, tokenizer: Tokenizer) -> bool:
    """Whether a text without special tokens lacks the marks."""
    marks = (*thoughts.syntax.starts, *thoughts.syntax.ends)
    tokens = map(tokenizer.added_token, marks)
    return any(token is not None and token.is_special for token in tokens)


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that begin `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def after_thoughts(grammar: str, thoughts: Thoughts, tokenizer: Tokenizer) -> str:
    """`grammar` for what follows the thoughts, which it does not bind.

    Where the model may think or not, it binds an output that opens no thoughts from its start: no
    answer escapes it. Both are grammars for llguidance. Raises InvalidRequestError where the
    result is too large.
    """
    if thoughts.begins is Phase.OVER:
        return grammar
    rules, closings = [], []
    for number, mark in enumerate(thoughts.syntax.ends):
        closings.append(f"thoughts_{number}")
        rules += _closing(f"thoughts_{number}", mark, tokenizer)
    block = f"({' | '.join(closings)}) FEEDS?"
    if thoughts.begins is Phase.MAY_OPEN:
        opening = " | ".join(tokenizer.in_grammar(mark) for mark in thoughts.syntax.starts)
        block = f"(FEEDS? ({opening}) {block})?"
    rules = [f"start: {block} @answer", r"FEEDS: /[ \r\n\t]+/", *rules]
    answer: list[dict[str, Any]] = (
        json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    )
    root = {"name": "root", "lark_grammar": "\n".join(rules)}
    parts = [root, {**answer[0], "name": "answer"}, *answer[1:]]
    both = json.dumps({"grammars": parts}, ensure_ascii=False)
    if len(both) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"the grammar of thoughts and answer has {len(both)} characters, {MAX_GRAMMAR_CHARS} "
            "are allowed: make the schema smaller"
        )
    return both


def _closing(rule: str, mark: str, tokenizer: Tokenizer) -> list[str]:
    """Rules for any text up to and with its first `mark`."""
    pattern = "".join(f"\\{char}" if char in "/." else char for char in mark)
    if tokenizer.added_token(mark) is None:
        return [rf"{rule}[lazy]: /(.|\n)*{pattern}/"]
    # To llguidance such a token is no text, special or not: the text before it must not spell it.
    free = rf"/(.|\n)*/ & ~/(.|\n)*{pattern}(.|\n)*/"
    return [
        f"{rule}: FREE_{rule.upper()}? {tokenizer.in_grammar(mark)}",
        f"FREE_{rule.upper()}: {free}",
    ]
