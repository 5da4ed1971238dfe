"""Request streams before they are a trace: turns of sessions, and the random numbers behind them.

Equal seeds, equal streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, log
from random import Random

from benchmarks.workloads.traces import BlockIds, Record, Segment

HOUR_S = 3600.0
SYSTEM: Segment = (0, 512)


@dataclass(slots=True, frozen=True)
class Turn:
    """One request of a session, before lines are numbered. Seconds; `gap`: after the turn before.

    A `session` of None is a request that stands alone.
    """

    at: float
    session: int | None
    segments: tuple[Segment, ...]
    output_length: int
    gap: float | None = None
    cache_salt: str | None = None

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return sum(size for _, size in self.segments)


class Draw:
    """The random numbers of one stream, and fresh segment ids."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._ids = count(SYSTEM[0] + 1)

    def lognormal(self, median: float, sigma: float) -> float:
        """A positive number with that median."""
        return self.random.lognormvariate(log(median), sigma)

    def geometric(self, mean: float) -> int:
        """1 or more, each as likely to be the last as any other."""
        return max(1, ceil(log(1.0 - self.random.random()) / log(1.0 - 1.0 / mean)))

    def output(self) -> int:
        """Tokens of one answer of a chat."""
        return round(min(max(self.random.gauss(350, 200), 4), 2000))

    def text(self, size: float) -> Segment:
        """New text of at least one token."""
        return next(self._ids), max(1, round(size))


def next_turn(draw: Draw, turn: Turn, added: float, *, gap: float) -> Turn:
    """The prompt before, its answer, and `added` tokens of new text."""
    segments = (*turn.segments, draw.text(turn.output_length), draw.text(added))
    return Turn(turn.at + gap, turn.session, segments, draw.output(), gap)


def records_of(turns: Sequence[Turn], *, grid_s: float) -> list[Record]:
    """Lines in order of arrival; stamps are rounded down to `grid_s`, 0: to milliseconds."""
    ids = BlockIds()
    last_of: dict[int, int] = {}
    records = []
    for line, turn in enumerate(sorted(turns, key=lambda turn: turn.at)):
        at = turn.at // grid_s * grid_s if grid_s else turn.at
        records.append(
            Record(
                timestamp=round(1000 * at),
                input_length=turn.input_length,
                output_length=turn.output_length,
                hash_ids=ids.of(turn.segments, turn.cache_salt),
                session_id=turn.session,
                parent=None if turn.session is None else last_of.get(turn.session),
                think_time=None if turn.gap is None else round(1000 * turn.gap),
                segments=turn.segments,
                cache_salt=turn.cache_salt,
            )
        )
        if turn.session is not None:
            last_of[turn.session] = line
    return records
