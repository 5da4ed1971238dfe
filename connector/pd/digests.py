"""xxh3-64 of blocks and states, over the arena's own bytes: no copy, and without the GIL.

Finds damage and mix-ups on the way, not forgery: peers are authenticated. Knows no request.
"""

import threading
import time
from collections.abc import Iterable, Sequence

import xxhash

from connector.pd.layout import Piece, SequenceBlocks
from engine.rpc.messages import BlockRange, Digests


class HeldDigests:
    """Digests of one held prefill. Whole blocks are hashed ahead, until a reader asks.

    From the last block to the first: a reader lacks the last ones, and may have all others.
    """

    def __init__(self, held: SequenceBlocks, memory: memoryview) -> None:
        self._held = held
        self._memory = memory
        self._known: dict[Piece, int] = {}
        self._is_over = threading.Event()

    @property
    def num_known(self) -> int:
        """Blocks hashed ahead."""
        return len(self._known)

    def hash_ahead(self, not_before: float = 0.0) -> None:
        """All blocks, or as many as there is time for before `stop`; from a monotonic time on."""
        self._is_over.wait(max(not_before - time.monotonic(), 0.0))
        for group in sorted(self._held.groups, key=lambda group: not group.is_state):
            for offset in reversed(group.offsets):
                if self._is_over.is_set():
                    return
                block = Piece(offset, group.block_bytes)
                self._known[block] = digest(self._memory, (block,))

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


def digest(memory: memoryview, pieces: Iterable[tuple[int, int]]) -> int:
    """Of one block or state, by the offset and length of each of its pieces."""
    hashed = xxhash.xxh3_64()
    for offset, length in pieces:
        hashed.update(memory[offset : offset + length])
    return hashed.intdigest()
