"""xxh3-64 of blocks and states, over the arena's own bytes: no copy, and without the GIL.

Finds damage and mix-ups on the way, not forgery: peers are authenticated. Knows no request.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import xxhash

from connector.pd.layout import Piece, SequenceBlocks
from engine.rpc.messages import BlockRange, Digests


class HeldDigests:
    """Digests of one held prefill. Whole blocks are hashed ahead, until one asks.

    States first, then from the last block on: that is what a reader lacks who has all others.
    `put` hears of each one by its number.
    """

    def __init__(
        self, held: SequenceBlocks, memory: memoryview, put: Callable[[int, int], None]
    ) -> None:
        self._held = held
        self._memory = memory
        self._put = put
        self._known: dict[tuple[int, int], int] = {}
        self._is_over = threading.Event()

    @property
    def num_known(self) -> int:
        """Blocks hashed ahead."""
        return len(self._known)

    def hash_ahead(self, not_before: float = 0.0) -> None:
        """All blocks, or as many as there is time for before `stop`; from a monotonic time on."""
        self._is_over.wait(max(not_before - time.monotonic(), 0.0))
        numbered = list(enumerate(self._held.whole_blocks()))
        for number, block in reversed(numbered):
            if self._is_over.is_set():
                return
            self._known[block] = digest(self._memory, (block,))
            self._put(number, self._known[block])

    def stop(self) -> None:
        """Nothing more is hashed ahead."""
        self._is_over.set()

    def of(self, ranges: Sequence[BlockRange]) -> Digests:
        """Every block of every range. Raises TransportError for ranges that are not held."""
        self.stop()
        return tuple(tuple(map(self._block, self._held.blocks(asked))) for asked in ranges)

    def _block(self, pieces: tuple[Piece, ...]) -> int:
        if len(pieces) > 1:
            return digest(self._memory, pieces)
        if pieces[0] not in self._known:
            self._known[pieces[0]] = digest(self._memory, pieces)
        return self._known[pieces[0]]


def step_back() -> None:
    """Where the kernel has the choice, this thread goes to an idle core: it interrupts nobody."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def digest(memory: memoryview, pieces: Iterable[tuple[int, int]]) -> int:
    """Of one block or state, by the offset and length of each of its pieces."""
    hashed = xxhash.xxh3_64()
    for offset, length in pieces:
        hashed.update(memory[offset : offset + length])
    return hashed.intdigest()
