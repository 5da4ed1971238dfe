"""P hashes what its leases hold: ahead, on a thread of its own, or when a reader asks.

Between P's answer and the end of the read lie a proxy, D's queue, one of its steps and the read; D
has to ask only for what is not hashed by then, or cut differently.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from connector.pd.layout import SequenceBlocks, blocks_announced
from connector.pd.wire.geometry import geometry_of
from connector.pd.wire.lease_record import step_back
from connector.pd.wire.messages import BlockIds, BlockRange, Digests
from engine.digests import DigestBlocks, Spans
from engine.errors import TransportError
from engine.kv_cache.arena_plan import ArenaPlan

ANSWER_S = 0.003
"""The answer that names the blocks goes out first; no reader comes before it."""
MAX_CUT = 64
"""So many blocks of a reader may lie in one of P's: it cuts tokens and layers finer."""
BATCH_BYTES = 8 << 20
"""Hashed between two looks at whether somebody asks, or the lease has ended: half a millisecond."""
DEVICE_BATCH_BYTES = 1 << 30
"""The same on a device, where a launch costs more than the bytes."""
T = TypeVar("T")
PutDigest = Callable[[int, int], None]
"""Takes number and digest of each block that was hashed ahead."""


class HeldDigests:
    """Digests of one held prefill. Whole blocks are hashed ahead, until one asks.

    States first, then from the last block on: a reader with a long prefix lacks only those.
    """

    def __init__(
        self,
        held: SequenceBlocks,
        digests: DigestBlocks,
        put: PutDigest,
        *,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._held = held
        self._digests = digests
        self._put = put
        self._batch_bytes = batch_bytes
        self._known: dict[tuple[int, int], int] = {}
        self._is_over = threading.Event()

    def hash_ahead(self, not_before: float = 0.0) -> None:
        """All blocks, or as many as there is time for before `stop`; from a monotonic time on."""
        self._is_over.wait(max(not_before - time.monotonic(), 0.0))
        # `whole_blocks` has states last; reversed, they come first.
        numbered = list(enumerate(self._held.whole_blocks()))
        for batch in in_batches(reversed(numbered), self._batch_bytes, size=lambda it: it[1][1]):
            if self._is_over.is_set():
                return
            found = self._digests([[block] for _, block in batch])
            for (number, block), digest in zip(batch, found, strict=True):
                self._known[block] = digest
                self._put(number, digest)
            # xxhash lets go of the GIL for long pieces only, and the engine's thread may want it.
            time.sleep(0)

    def stop(self) -> None:
        """Nothing more is hashed ahead."""
        self._is_over.set()

    def of(self, ranges: Sequence[BlockRange], left: threading.Event) -> Digests:
        """Every block of every range.

        Raises TransportError for ranges that are not held, for more than a reader of all that is
        held would ask for, and once the caller has `left`.
        """
        self.stop()
        self._check(ranges)
        return tuple(tuple(self._blocks(asked, left)) for asked in ranges)

    def _check(self, ranges: Sequence[BlockRange]) -> None:
        """No byte is asked for twice, and blocks are not cut ever so much smaller than here."""
        layers = Counter((asked.kept, layer) for asked in ranges for layer in asked.layers)
        twice = [layer for (_, layer), number in layers.items() if number > 1]
        if twice:
            raise TransportError(f"layers {sorted(twice)[:10]} are asked for more than once")
        num_blocks = sum(asked.num_blocks for asked in ranges)
        most = MAX_CUT * self._held.num_blocks
        if num_blocks > most:
            raise TransportError(
                f"{num_blocks} blocks are asked for; of the {self._held.num_blocks} that are held "
                f"{most} may be, so choose larger blocks"
            )

    def _blocks(self, asked: BlockRange, left: threading.Event) -> Iterator[int]:
        for batch in in_batches(self._held.blocks(asked), self._batch_bytes, size=_nbytes):
            if left.is_set():
                raise TransportError("whoever asked for digests has left")
            new = [block for block in batch if block[0] not in self._known or len(block) > 1]
            found = dict(zip(new, self._digests(new), strict=True))
            self._known.update((block[0], it) for block, it in found.items() if len(block) == 1)
            yield from (found[it] if it in found else self._known[it[0]] for it in batch)


class ArenaDigests:
    """Owner of the thread that hashes ahead. Each lease is one job on it, which ends with it."""

    def __init__(self, plan: ArenaPlan, digests: DigestBlocks, *, on_device: bool = False) -> None:
        self._plan = plan
        self._geometry = geometry_of(plan)
        batch_bytes = DEVICE_BATCH_BYTES if on_device else BATCH_BYTES
        self._held = partial(HeldDigests, digests=digests, batch_bytes=batch_bytes)
        self._thread = ThreadPoolExecutor(1, "kv-digests", initializer=step_back)

    def begin(self, block_ids: BlockIds, num_tokens: int, put: PutDigest) -> HeldDigests:
        """Hash the blocks of a lease, as a reader will come for them."""
        held = blocks_announced(self._plan, self._geometry, block_ids, num_tokens=num_tokens)
        digests = self._held(held, put=put)
        self._thread.submit(digests.hash_ahead, time.monotonic() + ANSWER_S)
        return digests

    def close(self) -> None:
        """Returns when the thread has ended; call before the arena is freed."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def in_batches(blocks: Iterable[T], limit: int, *, size: Callable[[T], int]) -> Iterator[list[T]]:
    """The same blocks in the same order; a batch is full once it has `limit` bytes."""
    batch: list[T] = []
    room = limit
    for block in blocks:
        batch.append(block)
        room -= size(block)
        if room <= 0:
            yield batch
            batch, room = [], limit
    if batch:
        yield batch


def _nbytes(block: Spans) -> int:
    return sum(length for _, length in block)
