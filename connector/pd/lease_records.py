"""What readers find in P's memory about a lease: that it lives, and digests of its blocks.

    | generation | number of digests | holding, 4 words | digest of block 0 | of block 1 | ...

The generation is written before the lease is granted and cleared before its blocks are free for
anything else. A reader fetches the record last: if the generation is unchanged, the blocks were
valid throughout the read. The holding is a digest of the prompt and of where its blocks lie
(`params.holding_of`): P itself says that it holds this prompt in these blocks. A block's digest of
0 means that P has not computed it yet.
Records lie in the arena's margin, readable like any other bytes, and so cost no message to P, nor
any of its time. Behind them is room for records of peers to arrive in.
"""

import secrets
import struct
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from engine.arena import MARGIN_BYTES, ArenaMemory

WORD_BYTES = 8
HEADER_WORDS = 6
NUM_WORDS = MARGIN_BYTES // WORD_BYTES // 2
"""Of all records; part of the protocol."""
NUM_PLACES = 64
"""As many pulls as a node may run at once (`PdConnectorConfig.max_concurrent_pulls`)."""
UNKNOWN = 0
"""Instead of a digest: P has not hashed this block yet."""
MAX_DIGESTS = NUM_WORDS // NUM_PLACES - HEADER_WORDS
"""In one record; of a longer lease P must be asked."""
FIRST_SERIAL_BITS = 35
"""Random: no record of one incarnation means anything in another. JSON's numbers hold it."""
_HOLDING = "<4q"


class RecordHeader(NamedTuple):
    """What a record begins with. `holding`: a SHA-256, `params.holding_of`."""

    generation: int
    num_digests: int
    holding: bytes


class LeaseRecord:
    """The record of one lease, until its owner ends it. `num_digests`: how many it has room for."""

    __slots__ = ("generation", "num_digests", "owner")

    def __init__(self, generation: int, num_digests: int, owner: "LeaseRecords") -> None:
        self.generation = generation
        self.num_digests = num_digests
        self.owner = owner

    @property
    def start(self) -> int:
        """Its first word, among all words of records."""
        return self.generation % NUM_WORDS

    @property
    def num_words(self) -> int:
        """With its header."""
        return HEADER_WORDS + self.num_digests

    def put(self, block: int, digest: int) -> None:
        """Readers may compare `block` from now on; nothing happens once the record has ended."""
        self.owner.put(self, block, digest)

    def end(self) -> None:
        """From now on its readers see that the lease has ended. Once for each record."""
        self.owner.end(self)


class LeaseRecords:
    """Owner of the records of one arena. Thread-safe: blocks are hashed while leases end."""

    def __init__(self, arena: ArenaMemory) -> None:
        self.offset = arena.nbytes - MARGIN_BYTES
        self._arena = arena
        self._serial = 1 + secrets.randbits(FIRST_SERIAL_BITS)
        self._free = FreeRuns(NUM_WORDS)
        self._lock = threading.Lock()

    def begin(self, num_blocks: int, holding: bytes) -> LeaseRecord | None:
        """A generation that no lease had before, and its record; None when all room is taken.

        Without digests where there is only room for the header, or the lease is too long.
        """
        with self._lock:
            for num_digests in (num_blocks, 0) if num_blocks <= MAX_DIGESTS else (0,):
                start = self._free.take(HEADER_WORDS + num_digests)
                if start is not None:
                    return self._write(start, num_digests, holding)
            return None

    def put(self, record: LeaseRecord, block: int, digest: int) -> None:
        """Writes the digest of a block into `record`, if that has room for it and has not ended."""
        with self._lock:
            words = _words_of(self._arena)
            if block < record.num_digests and int(words[record.start]) == record.generation:
                words[record.start + HEADER_WORDS + block] = _signed(digest)

    def end(self, record: LeaseRecord) -> None:
        """Gives its room back."""
        with self._lock:
            _words_of(self._arena)[record.start] = 0
            self._free.give(record.start, record.num_words)

    def _write(self, start: int, num_digests: int, holding: bytes) -> LeaseRecord:
        self._serial += 1
        record = LeaseRecord(self._serial * NUM_WORDS + start, num_digests, self)
        words = _words_of(self._arena)[start : start + record.num_words]
        words.zero_()
        words[1] = num_digests
        words[2:HEADER_WORDS] = torch.tensor(struct.unpack(_HOLDING, holding))
        words[0] = record.generation
        return record


class RecordPlaces:
    """Where records of peers arrive, one for each pull at a time."""

    def __init__(self, arena: ArenaMemory) -> None:
        self._arena = arena
        self._start = arena.nbytes - MARGIN_BYTES
        places = range(NUM_WORDS, 2 * NUM_WORDS, HEADER_WORDS + MAX_DIGESTS)
        self._free = deque(places)

    @contextmanager
    def place(self) -> Iterator[int]:
        """Byte offset of an empty place, ours for the block."""
        word = self._free.popleft()
        try:
            _words_of(self._arena)[word] = 0
            yield self._start + word * WORD_BYTES
        finally:
            self._free.append(word)

    def at(self, place: int, num_words: int) -> tuple[RecordHeader, list[int]]:
        """The record that has arrived there, as far as it was read: its header and digests."""
        first = (place - self._start) // WORD_BYTES
        words: list[int] = _words_of(self._arena)[first : first + num_words].tolist()
        holding = struct.pack(_HOLDING, *words[2:HEADER_WORDS])
        digests = [word % 2**64 for word in words[HEADER_WORDS:]]
        return RecordHeader(words[0], words[1], holding), digests


class FreeRuns:
    """Which of `total` places in a row are free; the first run that is long enough is taken."""

    def __init__(self, total: int) -> None:
        self._runs = [(0, total)]

    @property
    def num_free(self) -> int:
        """All of them."""
        return sum(length for _, length in self._runs)

    def take(self, length: int) -> int | None:
        """Where `length` places begin that were free; None when there are no such."""
        for number, (start, free) in enumerate(self._runs):
            if free >= length:
                rest = (start + length, free - length)
                self._runs[number : number + 1] = [rest] if rest[1] else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Places that were taken; they join the free ones beside them."""
        number = bisect_left(self._runs, (start, length))
        if number < len(self._runs) and self._runs[number][0] == start + length:
            length += self._runs.pop(number)[1]
        if number and sum(self._runs[number - 1]) == start:
            number -= 1
            start, before = self._runs.pop(number)
            length += before
        self._runs.insert(number, (start, length))


def offset_of(generation: int, records: int) -> int:
    """Where in a peer's arena the record of a lease is; its records begin at `records`."""
    return records + generation % NUM_WORDS * WORD_BYTES


def _signed(word: int) -> int:
    """The same 64 bits as torch takes them."""
    return word - 2**64 if word >= 2**63 else word


def _words_of(arena: ArenaMemory) -> torch.Tensor:
    """A view for the moment: one that is kept would keep the memory of an arena that was closed."""
    return arena.tensor[arena.nbytes - MARGIN_BYTES :].view(torch.int64)
