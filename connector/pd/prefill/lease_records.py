"""P's side of lease records: one for each lease, cleared before the lease's blocks are free."""

import secrets
import threading
from bisect import bisect_left
from dataclasses import dataclass

from connector.pd.wire.lease_record import (
    HEADER_WORDS,
    MAX_DIGESTS,
    NUM_WORDS,
    RecordHeader,
    start_of,
)

FIRST_SERIAL_BITS = 35
"""Random: no record of one incarnation means anything in another. JSON's numbers hold it."""


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """The record of one lease, until it is ended. `num_digests`: how many it has room for."""

    generation: int
    num_digests: int
    _owner: "LeaseRecords"

    def put(self, block: int, digest: int) -> None:
        """Lets readers compare `block`, if there is room for it and the lease lives. Any thread."""
        start = start_of(self.generation)
        with self._owner.lock:
            # The room of a record that has ended may be another one's by now.
            if block < self.num_digests and self._owner.words[start] == self.generation:
                self._owner.words[start + HEADER_WORDS + block] = digest

    def end(self) -> None:
        """Let readers see that the lease has ended, and give its room back. Once."""
        start = start_of(self.generation)
        with self._owner.lock:
            self._owner.words[start] = 0
            self._owner.free.give(start, HEADER_WORDS + self.num_digests)


class LeaseRecords:
    """Owner of the records in a region of 64-bit `words` (`REGION_BYTES` in all).

    `lock` guards `words` and `free`: blocks are hashed while leases end.
    """

    def __init__(self, words: "memoryview[int]") -> None:
        self.words = words
        self.free = FreeRuns(NUM_WORDS)
        self.lock = threading.Lock()
        self._serial = 1 + secrets.randbits(FIRST_SERIAL_BITS)

    def begin(self, num_blocks: int, holding: bytes) -> LeaseRecord | None:
        """A record with a generation that no lease had before; None when all room is taken.

        Without digests where there is only room for the header, or the lease is too long.
        """
        with self.lock:
            for num_digests in (num_blocks, 0) if num_blocks <= MAX_DIGESTS else (0,):
                start = self.free.take(HEADER_WORDS + num_digests)
                if start is not None:
                    break
            else:
                return None
            # The generation names its own place: `start_of` finds it without a table.
            self._serial += 1
            generation = self._serial * NUM_WORDS + start
            words = self.words[start : start + HEADER_WORDS + num_digests]
            words.cast("B")[:] = bytes(words.nbytes)
            RecordHeader(generation, num_digests, holding).write(words)
            return LeaseRecord(generation, num_digests, self)


class FreeRuns:
    """The free ones of `total` places in a row; `take` uses the first run that is long enough."""

    def __init__(self, total: int) -> None:
        self._runs = [(0, total)]  # (start, length), by start, never two that touch

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
