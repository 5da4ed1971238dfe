"""Requests as records of a trace, which become token ids and Mooncake's JSON lines.

Knows no cache. A record has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one
id per 512 tokens of the prompt, the last one maybe shorter, chained over what stands before. Our
generators add who follows whom, and `segments`, which say at every token what two prompts share; a
trace without them says it every 512 tokens.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.load.request import WITH_IDS, Request

TRACE_BLOCK = 512
STAMP_S = 3
"""The grid of the published stamps."""
ID_CYCLE = 1 << 17  # segment ids that many apart would have equal tokens

# Of a model that nobody has described: byte values are in every vocabulary, 0 and 1 often special.
SAFE_IDS = range(2, 256)

Segment = tuple[int, int]
Piece = tuple[int, int, int]  # of segment, from token, tokens
Content = tuple[Piece, ...]


class TraceError(ValueError):
    """A trace cannot be read; says where and why."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Equal `segments` (id, tokens) after equal ones are equal text.

    `parent`: the line, from 0 on, of the session's turn before. `think_time`: ms from that one on.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session_id: int | None = None
    parent: int | None = None
    think_time: float | None = None
    segments: tuple[Segment, ...] = ()
    cache_salt: str | None = None

    def pieces(self) -> tuple[Segment, ...]:
        """The segments; without them, the blocks."""
        if self.segments:
            return self.segments
        last = self.input_length - TRACE_BLOCK * (len(self.hash_ids) - 1)
        return (
            *((number, TRACE_BLOCK) for number in self.hash_ids[:-1]),
            (self.hash_ids[-1], last),
        )


def write_trace(file: Path, records: Iterable[Record]) -> None:
    """One JSON line per record."""
    file.write_bytes(msgspec.json.Encoder().encode_lines(records))


def arrivals(records: Sequence[Record]) -> Iterator[float]:
    """Seconds since the first stamp. Stamps of 3 s would be bursts that the trace did not have."""
    sizes = Counter(record.timestamp for record in records)
    stamps = list(sizes)
    ends = [*(later for _, later in pairwise(stamps)), stamps[-1] + 1000 * STAMP_S]
    for stamp, end in zip(stamps, ends, strict=True):
        width = min(end - stamp, 1000 * STAMP_S)
        for place in range(sizes[stamp]):
            yield (stamp - stamps[0] + width * place / sizes[stamp]) / 1000


def requests_of(
    records: Sequence[Record], ids: Sequence[int], *, time_scale: float = 1.0, stamps: bool = False
) -> list[Request]:
    """In the order of the trace, greedy, with prompts of `ids`; equal segments are equal ids.

    Turns wait for the answer before them and think; with `stamps` all come at their own times.
    """
    made = []
    for at, record in zip(arrivals(records), records, strict=True):
        salt = {"cache_salt": record.cache_salt} if record.cache_salt else {}
        is_later = record.parent is not None and not stamps
        alone = stamps or record.session_id is None
        made.append(
            Request(
                prompt=tuple(_tokens(record, ids)),
                max_tokens=record.output_length,
                sampling={**WITH_IDS, **salt},
                session="" if alone else str(record.session_id),
                arrival_s=0.0 if is_later else at * time_scale,
                think_s=(record.think_time or 0.0) / 1000 * time_scale * is_later,
            )
        )
    return made


def _tokens(record: Record, ids: Sequence[int]) -> Iterator[int]:
    """Drawn from a segment's number, so that a longer piece of it begins with a shorter one."""
    for number, size in record.pieces():
        draw = random.Random(number)
        yield from (draw.choice(ids) for _ in range(size))


class TokenTable:
    """Token ids of segments: another id begins with another token, so nothing else is shared."""

    def __init__(self, longest: int) -> None:
        self._ids = list(range(ID_CYCLE)) * (1 + -(-longest // ID_CYCLE))

    @classmethod
    def for_records(cls, records: Iterable[Record]) -> "TokenTable":
        """A table that is long enough for all of them."""
        return cls(max(size for record in records for _, size in record.pieces()))

    def tokens(self, segments: Sequence[Segment]) -> list[int]:
        """The token ids of a whole prompt."""
        made: list[int] = []
        for number, size in segments:
            start = number * 7919 % ID_CYCLE
            made += self._ids[start : start + size]
        return made


class BlockIds:
    """Names 512-token blocks: equal ids for equal text after equal prefixes, and no others."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int | str | None, Content], int] = {}

    def of(self, segments: Sequence[Segment], cache_salt: str | None = None) -> tuple[int, ...]:
        """The `hash_ids` of a prompt."""
        ids: list[int] = []
        for content in _blocks(segments):
            key = (ids[-1] if ids else cache_salt, content)
            ids.append(self._ids.setdefault(key, len(self._ids)))
        return tuple(ids)


def _blocks(segments: Sequence[Segment]) -> list[Content]:
    """Every 512 tokens of a prompt as pieces."""
    blocks: list[list[Piece]] = []
    room = 0
    for number, size in segments:
        start = 0
        while start < size:
            if not room:
                blocks.append([])
                room = TRACE_BLOCK
            taken = min(room, size - start)
            blocks[-1].append((number, start, taken))
            start, room = start + taken, room - taken
    return [tuple(block) for block in blocks]


@dataclass(slots=True)
class Node:
    """Where some prompt has been; the segments that came next."""

    children: "dict[int, Node]" = field(default_factory=dict)


def ideal_hits(records: Iterable[Record]) -> list[int]:
    """Tokens of each prompt that some prompt before it began with, all but its last token.

    Brute force over whole segments; shares nothing with the engine's index. No cache can do better
    without the outputs.
    """
    roots: dict[str | None, Node] = {}
    hits = []
    for record in records:
        node, hit, is_known = roots.setdefault(record.cache_salt, Node()), 0, True
        for number, size in record.pieces():
            is_known = is_known and number in node.children
            hit += size * is_known
            node = node.children.setdefault(number, Node())
        hits.append(min(hit, record.input_length - 1))
    return hits
