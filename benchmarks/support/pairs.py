"""Measurements side by side: rounds in which every way runs once, in turning order.

A ratio is taken inside one round, so that a slow minute of the machine hits both of its sides.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Self, TypeVar

import msgspec

T = TypeVar("T")
Way = Callable[[], T]


class Spread(msgspec.Struct, frozen=True):
    """Median, lowest and highest of one number over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratio(cls, above: Sequence[float], below: Sequence[float]) -> Self:
        """The spread of above[i] / below[i], one ratio per round."""
        return cls.of([one / other for one, other in zip(above, below, strict=True)])

    def show(self, digits: int = 2) -> str:
        """`1.93 (1.84-2.01)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def share(until: float, left: int) -> float:
    """When (monotonic) the next of `left` equal parts should end, to keep to `until`."""
    now = monotonic()
    return now + max(0.0, until - now) / left


def turns(rounds: int, warmups: int = 1) -> int:
    """How often `alternate` runs every way: one round measures little, and gets no warm-up."""
    return rounds + warmups if rounds > 1 else rounds


def alternate(
    ways: Mapping[str, Way[T]],
    rounds: int,
    *,
    warmups: int = 1,
    until: float = math.inf,
    done: Callable[[], None],
) -> dict[str, list[T]]:
    """Results of every way by round, after `warmups` rounds that do not count (see `turns`).

    The order turns by one each round. `done` is called after each run, warm-ups included. From the
    second round on, one that would hardly end before `until` (monotonic) is left out with the rest.
    """
    names = list(ways)
    results: dict[str, list[T]] = {name: [] for name in names}
    longest = 0.0
    for number in range(rounds - turns(rounds, warmups), rounds):
        began = monotonic()
        if number > 0 and began + longest > until:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = ways[name]()
            done()
            if number >= 0:
                results[name].append(result)
        longest = max(longest, monotonic() - began)
    return results
