"""D's side of lease records: places where records of peers arrive."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from connector.pd.wire.lease_record import (
    HEADER_WORDS,
    MAX_DIGESTS,
    NUM_WORDS,
    WORD_BYTES,
    RecordHeader,
)


class RecordPlaces:
    """Places in the second half of this node's 64-bit `words`, one for each pull at a time."""

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        places = range(NUM_WORDS, 2 * NUM_WORDS, HEADER_WORDS + MAX_DIGESTS)
        self._free = deque(place * WORD_BYTES for place in places)

    @contextmanager
    def place(self) -> Iterator[int]:
        """Byte offset of an empty place, which nobody else uses within the block."""
        place = self._free.popleft()
        try:
            self._words[place // WORD_BYTES] = 0
            yield place
        finally:
            self._free.append(place)

    def at(self, place: int, num_words: int) -> tuple[RecordHeader, list[int]]:
        """The record that has arrived at a place, as far as it was read: its header and digests."""
        first = place // WORD_BYTES
        words = self._words[first : first + num_words]
        return RecordHeader.read(words), words[HEADER_WORDS:].tolist()
