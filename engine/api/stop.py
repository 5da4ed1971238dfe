"""Stop strings on a stream of text, however it is cut. Knows nothing of tokens."""

from collections.abc import Sequence
from typing import NamedTuple


class Fed(NamedTuple):
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    matched: str | None


class _Needle:
    """Knuth-Morris-Pratt automaton; `state` is how much of `text` the stream now ends with."""

    __slots__ = ("_fallback", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._fallback = _failure_table(text)

    def step(self, char: str) -> bool:
        """Take one character; true when the whole stop string now stands at the end."""
        if self.state == len(self.text):
            self.state = self._fallback[-1]
        while self.state and self.text[self.state] != char:
            self.state = self._fallback[self.state - 1]
        self.state += self.text[self.state] == char
        return self.state == len(self.text)


def _failure_table(text: str) -> list[int]:
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        length += text[index] == text[length]
        table[index] = length
    return table


class StopMatcher:
    """Holds back text that could begin a stop string and cuts the stream at the first match.

    The first match is the one that ends first; of several that end together, the longest. With
    `include` the stop string itself is shown.
    """

    __slots__ = ("_held", "_include", "_needles")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._needles = [_Needle(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> Fed:
        """Add text; while not `armed` a match is let pass.

        After a match the matcher must not be fed.
        """
        if not self._needles:
            return Fed(text, None)
        for index, char in enumerate(text):
            hits = [needle.text for needle in self._needles if needle.step(char)]
            if hits and armed:
                return self._cut(self._held + text[: index + 1], max(hits, key=len))
        return Fed(self._hold_back(self._held + text), None)

    def flush(self) -> str:
        """Give out what was held back; the stream ended and no stop string came."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, stop: str) -> Fed:
        self._held = ""
        return Fed(text if self._include else text[: -len(stop)], stop)

    def _hold_back(self, text: str) -> str:
        visible = len(text) - max(needle.state for needle in self._needles)
        self._held = text[visible:]
        return text[:visible]
