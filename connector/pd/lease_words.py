"""One word of memory per lease: a reader fetches it behind its blocks, and so knows that they held.

A word is the lease's generation, written before the lease is granted and cleared before its blocks
are free for anything else. Words lie in the arena's margin, readable like any other bytes; at its
end is room for words of peers to arrive in. A word costs no message to P, nor any time of its own.
"""

import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.arena import MARGIN_BYTES, ArenaMemory

WORD_BYTES = 8
NUM_PLACES = 64
"""As many pulls as a node may run at once (`PdConnectorConfig.max_concurrent_pulls`)."""
NUM_WORDS = MARGIN_BYTES // WORD_BYTES - NUM_PLACES
"""As many leases as a node grants at once; part of the protocol."""
FIRST_GENERATION_BITS = 48
"""Random, so that no word of one incarnation means anything in another; JSON's numbers hold it."""


class LeaseWords:
    """The words of one arena; not thread-safe."""

    def __init__(self, arena: ArenaMemory) -> None:
        self.offset = arena.nbytes - MARGIN_BYTES
        self._arena = arena
        self._last = 1 + secrets.randbits(FIRST_GENERATION_BITS)

    @property
    def limit(self) -> int:
        """Leases at once."""
        return NUM_WORDS

    def begin(self) -> int:
        """A generation that no lease had before, with its word. There must be less than all."""
        words = _words_of(self._arena)
        self._last += 1
        while words[self._last % NUM_WORDS]:
            self._last += 1
        words[self._last % NUM_WORDS] = self._last
        return self._last

    def end(self, generation: int) -> None:
        """From now on its readers see that the lease has ended."""
        _words_of(self._arena)[generation % NUM_WORDS] = 0


class WordPlaces:
    """Where words of peers arrive, one for each pull at a time."""

    def __init__(self, arena: ArenaMemory) -> None:
        self._arena = arena
        self._start = arena.nbytes - MARGIN_BYTES
        self._free = deque(range(NUM_WORDS, NUM_WORDS + NUM_PLACES))

    @contextmanager
    def place(self) -> Iterator[int]:
        """Byte offset of an empty place, ours for the block."""
        number = self._free.popleft()
        try:
            _words_of(self._arena)[number] = 0
            yield self._start + number * WORD_BYTES
        finally:
            self._free.append(number)

    def at(self, place: int) -> int:
        """What has arrived there."""
        return int(_words_of(self._arena)[(place - self._start) // WORD_BYTES])


def offset_of(generation: int, words: int) -> int:
    """Where in a peer's arena the word of a lease is; its words begin at `words`."""
    return words + generation % NUM_WORDS * WORD_BYTES


def _words_of(arena: ArenaMemory) -> torch.Tensor:
    """A view for the moment: one that is kept would keep the memory of an arena that was closed."""
    return arena.tensor[arena.nbytes - MARGIN_BYTES :].view(torch.int64)
