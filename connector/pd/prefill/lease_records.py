"""P's side of lease records: one for each lease, cleared before the lease's blocks are free."""

import secrets
import threading
from bisect import bisect_left

from connector.pd.wire.lease_record import (
    HEADER_WORDS,
    MAX_DIGESTS,
    NUM_WORDS,
    RecordHeader,
    start_of,
)

FIRST_SERIAL_BITS = 35
"""Random: no record of one incarnation means anything in another. JSON's numbers hold it."""


class LeaseRecord:
    """The record of one lease, until it is ended. `num_digests`: how many it has room for."""

    __slots__ = ("_owner", "generation", "num_digests")

    def __init__(self, generation: int, num_digests: int, owner: "LeaseRecords") -> None:
        self.generation = generation
        self.num_digests = num_digests
        self._owner = owner

    def put(self, block: int, digest: int) -> None:
        """Let readers compare `block` from now on; does nothing once the record has ended."""
        self._owner.put(self, block, digest)

    def end(self) -> None:
        """Let readers see that the lease has ended. Once for each record."""
        self._owner.end(self)


class LeaseRecords:
    """Owner of the records in a region of 64-bit `words` (`REGION_BYTES` in all).

    Thread-safe: blocks are hashed while leases end.
    """

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        self._serial = 1 + secrets.randbits(FIRST_SERIAL_BITS)
        self._free = FreeRuns(NUM_WORDS)
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Words that no record takes."""
        return self._free.num_free

    def begin(self, num_blocks: int, holding: bytes) -> LeaseRecord | None:
        """A record with a generation that no lease had before; None when all room is taken.

        Without digests where there is only room for the header, or the lease is too long.
        """
        with self._lock:
            for num_digests in (num_blocks, 0) if num_blocks <= MAX_DIGESTS else (0,):
                start = self._free.take(HEADER_WORDS + num_digests)
                if start is not None:
                    break
            else:
                return None
            # The generation names its own place: `start_of` finds it without a table.
            self._serial += 1
            generation = self._serial * NUM_WORDS + start
            words = self._words[start : start + HEADER_WORDS + num_digests]
            words.cast("B")[:] = bytes(words.nbytes)
            RecordHeader(generation, num_digests, holding).write(words)
            return LeaseRecord(generation, num_digests, self)

    def put(self, record: LeaseRecord, block: int, digest: int) -> None:
        """Write the digest of a block, if the record has room for it and has not ended."""
        start = start_of(record.generation)
        with self._lock:
            # The room of a record that has ended may be another one's by now.
            if block < record.num_digests and self._words[start] == record.generation:
                self._words[start + HEADER_WORDS + block] = digest

    def end(self, record: LeaseRecord) -> None:
        """Clear the generation and give the room back."""
        start = start_of(record.generation)
        with self._lock:
            self._words[start] = 0
            self._free.give(start, HEADER_WORDS + record.num_digests)


class FreeRuns:
    """The free ones of `total` places in a row; `take` uses the first run that is long enough."""

    def __init__(self, total: int) -> None:
        self._runs = [(0, total)]  # (start, length), by start, never two that touch

    @property
    def num_free(self) -> int:
        """Places in all runs."""
        return sum(length for _, length in self._runs)

    def take(self, length: int) -> int | None:
        """The first of `length` free places in a row; None when no run is that long."""
        for number, (start, free) in enumerate(self._runs):
            if free >= length:
                rest = (start + length, free - length)
                self._runs[number : number + 1] = [rest] if rest[1] else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Free places that were taken; they join the runs on both sides.

        before |===|   |===|        after  |===========|
                   given
        """
        number = bisect_left(self._runs, (start, length))
        if number < len(self._runs) and self._runs[number][0] == start + length:
            length += self._runs.pop(number)[1]
        if number and sum(self._runs[number - 1]) == start:
            number -= 1
            start, before = self._runs.pop(number)
            length += before
        self._runs.insert(number, (start, length))
