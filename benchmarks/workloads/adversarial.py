"""G6, adversarial: prompts made to fall between blocks.

A case is a few short streams; their last prompts are judged. Where a prompt extends a whole served
one, or shares a prefix that two served ones had, the hit may be at most one block below the ideal.
The second sighting of a shared prefix can only use states that were kept without knowing where
prompts would part: it is reported, not judged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from benchmarks.workloads.traces import BlockIds, Record, Segment

BLOCK_SIZE = 16
SHARED = range(1, 3 * BLOCK_SIZE + 3)
DEEP = range(100 * BLOCK_SIZE - 1, 100 * BLOCK_SIZE + 2)
TAILS = (1, 15, 16, 17, 40)
GAP_MS = 10


@dataclass(slots=True, frozen=True)
class Stream:
    """Prompts in order; the last `judged` of them count."""

    records: list[Record]
    judged: int = 1


@dataclass(slots=True, frozen=True)
class Case:
    """Streams of one kind, each on a fresh node. `max_loss`: tokens below the ideal; None: any."""

    name: str
    streams: list[Stream]
    max_loss: int | None = BLOCK_SIZE


class Texts:
    """Records of prompts made of old and new text."""

    def __init__(self) -> None:
        self._new = count(1)
        self._ids = BlockIds()

    def new(self, size: int) -> Segment:
        """Text that nothing else begins with."""
        return next(self._new), size

    def record(self, *segments: Segment, salt: str | None = None) -> Record:
        """One request with this prompt."""
        size = sum(size for _, size in segments)
        ids = self._ids.of(segments, salt)
        return Record(0, size, 1, ids, segments=segments, cache_salt=salt)

    def branches(self, shared: int, tails: Sequence[int]) -> Stream:
        """Prompts that share exactly `shared` tokens; the last one is judged."""
        prefix = self.new(shared)
        return Stream([self.record(prefix, self.new(tail)) for tail in tails])

    def extended(self, shared: int, tail: int) -> Stream:
        """A prompt, then one that goes on from its end."""
        prefix = self.new(shared)
        return Stream([self.record(prefix), self.record(prefix, self.new(tail))])


def cases() -> Iterator[Case]:
    """Every adversarial case."""
    texts = Texts()
    sweep = [(shared, tail) for shared in SHARED for tail in TAILS]
    block = texts.new(BLOCK_SIZE)
    yield Case(
        "all share one block",
        [Stream([texts.record(block, texts.new(100)) for _ in range(20)], judged=18)],
    )
    for shared in DEEP:
        name = f"{shared:,} tokens shared, third sighting"
        yield Case(name, [texts.branches(shared, (600, 500, tail)) for tail in TAILS])
    yield Case("shorter than a block, asked again", [_repeated(texts, n) for n in range(2, 16)])
    yield Case("shorter than a block, extended", [texts.extended(n, 40) for n in range(1, 16)])
    yield Case("sweep, whole prompt extended", [texts.extended(*pair) for pair in sweep])
    yield Case("sweep, third sighting", [texts.branches(n, (tail,) * 3) for n, tail in sweep])
    yield Case("two tenants, equal text", [_tenants(texts, n) for n in (16, 160, 1600)], max_loss=0)
    yield Case("1,500 of 2,200 shared, third", [texts.branches(1500, (700, 700, 700))])
    yield Case(
        "sweep, second sighting",
        [texts.branches(n, (tail,) * 2) for n, tail in sweep],
        max_loss=None,
    )
    yield Case("1,600 of 2,200 shared, second", [texts.branches(1600, (600, 600))], max_loss=None)


def _repeated(texts: Texts, size: int) -> Stream:
    record = texts.record(texts.new(size))
    return Stream([record, record])


def _tenants(texts: Texts, size: int) -> Stream:
    prompt = (texts.new(size), texts.new(30))
    return Stream([texts.record(*prompt, salt=salt) for salt in ("a", "a", "b", "c")], judged=2)


def adversarial(scale: float = 1.0, seed: int = 0) -> list[Record]:
    """All cases, one after the other, 10 ms apart, for every seed; at a smaller scale the first."""
    records = [record for case in cases() for stream in case.streams for record in stream.records]
    first = records[: max(1, round(scale * len(records)))]
    return [
        msgspec.structs.replace(record, timestamp=GAP_MS * number)
        for number, record in enumerate(first)
    ]
