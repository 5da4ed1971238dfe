"""Synthetic request streams with the statistics of published traces; equal seeds, equal streams.

G1 resembles Mooncake's one-hour conversation trace: long first prompts, sessions that go on, one
shared system prompt. G2 asks questions about long documents beside short chats: prompts part ways
deep inside. A smaller `scale` thins the stream: fewer sessions in the same time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import log
from random import Random
from types import MappingProxyType

from benchmarks.kv_cache.traces import BlockIds, Record, Segment

HOUR_S = 3600.0
SYSTEM: Segment = (0, 512)
MAX_PROMPT = 126_000
STAMP_S = 3
GO_ON = (0.33, 0.42, 0.48, 0.53, 0.58)

DOCUMENTS = 150
ASKED = (2, 3, 4, 6, 10)
ASKED_WITHIN_S = 250.0
CHATS = 1500
CHATS_S = 1000.0


@dataclass(slots=True, frozen=True)
class Turn:
    """One request of a session, before lines are numbered."""

    at: float
    session: int
    segments: tuple[Segment, ...]
    output_length: int
    gap: float | None = None

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

    def output(self) -> int:
        """Tokens of one answer."""
        return round(min(max(self.random.gauss(350, 200), 4), 2000))

    def text(self, size: float) -> Segment:
        """New text of at least one token."""
        return next(self._ids), max(1, round(size))


def conversation(scale: float = 1.0, seed: int = 0) -> list[Record]:
    """G1: one hour; 12,000 requests of 12,000 tokens in the mean at scale 1."""
    draw = Draw(seed)
    turns: list[Turn] = []
    at, rate = 0.0, 0.61 * 3.4 * scale
    for session in count():
        at += draw.random.expovariate(rate)
        if at >= HOUR_S:
            return _records([turn for turn in turns if turn.at < HOUR_S])
        turns += _conversation(draw, at, session)
    raise AssertionError("unreachable")


def _conversation(draw: Draw, at: float, session: int) -> Iterator[Turn]:
    first = min(draw.lognormal(5400, 1.2), MAX_PROMPT) - SYSTEM[1]
    turn = Turn(at, session, (SYSTEM, draw.text(first)), draw.output())
    for chance in _and_so_on(GO_ON):
        yield turn
        turn = _next_turn(draw, turn, draw.lognormal(500, 1.5), gap=draw.lognormal(125, 1.1))
        if draw.random.random() >= chance or turn.input_length > MAX_PROMPT:
            return


def _and_so_on(chances: tuple[float, ...]) -> Iterator[float]:
    yield from chances
    while True:
        yield chances[-1]


def _next_turn(draw: Draw, turn: Turn, added: float, *, gap: float) -> Turn:
    """The prompt before, its answer, and `added` tokens of new text."""
    segments = (*turn.segments, draw.text(turn.output_length), draw.text(added))
    return Turn(turn.at + gap, turn.session, segments, draw.output(), gap)


def documents(scale: float = 1.0, seed: int = 0) -> list[Record]:
    """G2: 150 documents asked 2 to 10 times with other questions, 1,500 short chats, at scale 1."""
    draw = Draw(seed)
    turns: list[Turn] = []
    for number in range(round(DOCUMENTS * scale)):
        start = draw.random.uniform(0, CHATS_S - ASKED_WITHIN_S)
        document = draw.text(draw.random.uniform(10_000, 50_000))
        for _ in range(ASKED[number % len(ASKED)]):
            question = draw.text(draw.random.uniform(20, 900))
            at = start + draw.random.uniform(0, ASKED_WITHIN_S)
            turns.append(Turn(at, len(turns), (document, question), draw.output()))
    for session in range(len(turns), len(turns) + round(CHATS * scale)):
        turns += _chat(draw, session)
    return _records(turns)


def _chat(draw: Draw, session: int) -> Iterator[Turn]:
    at = draw.random.uniform(0, CHATS_S)
    turn = Turn(at, session, (draw.text(draw.lognormal(1200, 0.7)),), draw.output())
    yield turn
    for _ in range(draw.random.randint(0, 5)):
        turn = _next_turn(draw, turn, draw.lognormal(250, 0.8), gap=draw.lognormal(30, 0.8))
        yield turn


def _records(turns: list[Turn]) -> list[Record]:
    """Lines in order of arrival."""
    ids = BlockIds()
    last_of: dict[int, int] = {}
    records = []
    for line, turn in enumerate(sorted(turns, key=lambda turn: turn.at)):
        records.append(
            Record(
                timestamp=1000 * (int(turn.at) // STAMP_S * STAMP_S),
                input_length=turn.input_length,
                output_length=turn.output_length,
                hash_ids=ids.of(turn.segments),
                session_id=turn.session,
                parent=last_of.get(turn.session),
                think_time=None if turn.gap is None else round(1000 * turn.gap),
                segments=turn.segments,
            )
        )
        last_of[turn.session] = line
    return records


# What a stream is thinned to by default, so that replays take seconds.
WORKLOADS: Mapping[str, tuple[Callable[[float, int], list[Record]], float]] = MappingProxyType(
    {"G1 conversation": (conversation, 0.03), "G2 documents": (documents, 0.1)}
)
