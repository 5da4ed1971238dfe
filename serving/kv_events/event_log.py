"""A publisher's batches in order: cut to size, numbered, replayed, and the state that they make.

cache's events -> batches of bounded size -> queue -> sent, and kept for replays
                                               '--> mirror: the state, for those who come late
"""

import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from serving.kv_events.wire import (
    MAMBA,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Form,
    encode,
)

MAX_BATCH_BYTES = 2 * 2**20
"""Of an encoded batch, at most: consumers may refuse long ones, ours those of 4 MiB."""
_MOST_OF_EVENT = 2048  # names, small values and a salt of 256 characters, at most
_MOST_OF_HASH = 70  # with an entry among the extra keys
_MOST_OF_TOKEN = 5


def batches(
    events: Sequence[Event], max_bytes: int = MAX_BATCH_BYTES
) -> Iterator[tuple[Event, ...]]:
    """The same changes in the same order, in as few batches as their largest possible sizes allow.

    An event that is too long is cut between its blocks; a single block is never cut.
    """
    # On the engine thread: nearly every step fits, and is only measured.
    if events and sum(map(_most_bytes, events)) <= max_bytes:
        yield tuple(events)
        return
    batch: list[Event] = []
    num_bytes = 0
    for event in events:
        for part in _parts(event, max_bytes):
            more = _most_bytes(part)
            if batch and num_bytes + more > max_bytes:
                yield tuple(batch)
                batch, num_bytes = [], 0
            batch.append(part)
            num_bytes += more
    if batch:
        yield tuple(batch)


def _most_bytes(event: Event) -> int:
    if isinstance(event, BlockStored):
        num_bytes = _MOST_OF_HASH * len(event.block_hashes) + _MOST_OF_TOKEN * len(event.token_ids)
        return _MOST_OF_EVENT + num_bytes
    if isinstance(event, BlockRemoved):
        return _MOST_OF_EVENT + _MOST_OF_HASH * len(event.block_hashes)
    return _MOST_OF_EVENT


def _parts(event: Event, max_bytes: int) -> Iterator[Event]:
    is_short = _most_bytes(event) <= max_bytes
    if is_short or isinstance(event, AllBlocksCleared) or len(event.block_hashes) == 1:
        yield event
        return
    num_blocks = len(event.block_hashes)
    halves = [_slice(event, 0, num_blocks // 2), _slice(event, num_blocks // 2, num_blocks)]
    # Parents stand first in an event: they are stored first, and removed last.
    for half in halves if isinstance(event, BlockStored) else reversed(halves):
        yield from _parts(half, max_bytes)


def _slice(event: BlockStored | BlockRemoved, start: int, end: int) -> BlockStored | BlockRemoved:
    hashes = event.block_hashes
    if isinstance(event, BlockRemoved):
        return replace(event, block_hashes=hashes[start:end])
    return replace(
        event,
        block_hashes=hashes[start:end],
        parent_block_hash=hashes[start - 1] if start else event.parent_block_hash,
        token_ids=event.token_ids[start * event.block_size : end * event.block_size],
        extra_keys=event.extra_keys and event.extra_keys[start:end],
    )


TOKEN_BYTES = 4
_BLOCK_BYTES = 64  # beside its tokens, at most


class _Block(msgspec.Struct, frozen=True, gc=False):
    """`num_copies` of one hash; frozen, so that a shallow copy of its table stays as it is.

    `size`: its tokens' number; `tokens`: empty for tiers that do not tell them.
    """

    parent: BlockHash | None
    size: int
    tokens: bytes
    extra_keys: tuple[Any, ...] | None
    num_copies: int = 1


class _Tier(NamedTuple):
    """Where a hash is counted: what a removal names."""

    group_idx: int | None
    medium: str | None


class _Table(NamedTuple):
    kind: str | None
    sliding_window: int | None
    blocks: dict[BlockHash, _Block]


_Run = list[tuple[BlockHash, _Block]]


class CacheMirror:
    """Which hashes stand, how often, and all that storing them said; some 270 bytes for each."""

    def __init__(self) -> None:
        self._tables: dict[_Tier, _Table] = {}

    @property
    def num_blocks(self) -> int:
        """Different hashes in all groups and tiers."""
        return sum(len(table.blocks) for table in self._tables.values())

    def apply(self, events: Sequence[Event]) -> None:
        """Follow what a step announced."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._tables.clear()

    def copy(self) -> "CacheMirror":
        """The state as it is now, at the price of its tables alone: blocks are shared."""
        copied = CacheMirror()
        for tier, table in self._tables.items():
            copied._tables[tier] = table._replace(blocks=table.blocks.copy())
        return copied

    def drain(self, num_bytes: int) -> Iterator[list[BlockStored]]:
        """The events that make this state, in lists of about `num_bytes`; empties it.

        Parents come before children, and a block that is stored n times comes n times.
        """
        events: list[BlockStored] = []
        num_listed = 0  # bytes
        for tier, table in self._tables.items():
            # A checkpoint is no stretch of blocks: each is an event of its own.
            longest = 1 if table.kind == MAMBA else num_bytes
            for run in _runs(table.blocks, longest):
                events.append(_stored(tier, table, run))
                num_listed += len(run) * _num_bytes(run[0])
                if num_listed >= num_bytes:
                    yield events
                    events, num_listed = [], 0
        if events:
            yield events

    def _store(self, event: BlockStored) -> None:
        tier = _Tier(event.group_idx, event.medium)
        table = self._tables.get(tier)
        if table is None:
            kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            table = self._tables[tier] = _Table(kind, window, {})
        tokens, size = array("I", event.token_ids).tobytes(), event.block_size * TOKEN_BYTES
        parent, extra = event.parent_block_hash, event.extra_keys
        for place, block_hash in enumerate(event.block_hashes):
            known = table.blocks.get(block_hash)
            if known is None:
                own = tokens[place * size : (place + 1) * size]
                keys = None if extra is None else extra[place]
                added = _Block(parent, event.block_size, own, keys)
            else:
                added = _copies(known, 1)
            table.blocks[block_hash] = added
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        table = self._tables.get(_Tier(event.group_idx, event.medium))
        if table is None:
            return
        for block_hash in event.block_hashes:
            block = table.blocks.pop(block_hash, None)
            if block is not None and block.num_copies > 1:
                table.blocks[block_hash] = _copies(block, -1)


def _copies(block: _Block, change: int) -> _Block:
    return msgspec.structs.replace(block, num_copies=block.num_copies + change)


def _runs(blocks: dict[BlockHash, _Block], longest: int) -> Iterator[_Run]:
    """Every copy of every block, in runs of parent and child; empties `blocks`."""
    while blocks:
        # The latest block is a leaf or near one; what is above it goes out with it, from the top.
        block_hash, block = blocks.popitem()
        path = [(block_hash, block)]
        while (parent := block.parent) in blocks and parent is not None:
            block = blocks.pop(parent)
            path.append((parent, block))
        path.reverse()
        for copy in range(1, 1 + max(block.num_copies for _, block in path)):
            counted = groupby([(copy <= item[1].num_copies, item) for item in path], itemgetter(0))
            runs = [[item for _, item in run] for is_there, run in counted if is_there]
            yield from chain.from_iterable(_cut(run, longest) for run in runs)


def _cut(run: _Run, longest: int) -> Iterator[_Run]:
    """Pieces with blocks of one length that all tell their tokens, or none of which does.

    Each is ended by the block with which it has `longest` bytes.

    A piece is an event, so how long it gets must not depend on how many tokens a block has.
    """
    start = 0
    for place, (before, after) in enumerate(pairwise(run), 1):
        is_full = (place - start) * _num_bytes(before) >= longest
        is_other = before[1].size != after[1].size or bool(before[1].tokens) != bool(
            after[1].tokens
        )
        if is_full or is_other:
            yield run[start:place]
            start = place
    yield run[start:]


def _num_bytes(item: tuple[BlockHash, _Block]) -> int:
    return _BLOCK_BYTES + len(item[1].tokens)


def _stored(tier: _Tier, table: _Table, run: _Run) -> BlockStored:
    tokens = array("I", b"".join(block.tokens for _, block in run))
    extra = tuple(block.extra_keys for _, block in run)
    return BlockStored(
        tuple(block_hash for block_hash, _ in run),
        run[0][1].parent,
        tuple(tokens),
        run[0][1].size,
        medium=tier.medium,
        extra_keys=extra if any(extra) else None,
        group_idx=tier.group_idx,
        kv_cache_spec_kind=table.kind,
        kv_cache_spec_sliding_window=table.sliding_window,
    )


SNAPSHOT_BYTES = 128 * 2**10
"""One batch of a snapshot, about: some milliseconds of work, 1,024 hashes of 16 tokens."""


class NumberedPayload(NamedTuple):
    """An encoded batch and its sequence number; of a snapshot, the number that the state has."""

    sequence: int
    payload: bytes


class _Waiting(NamedTuple):
    sequence: int
    ts: float
    events: tuple[Event, ...]


class EventLog:
    """Takes batches from one thread and gives them, numbered and encoded, to another.

    Number 0 is an `AllBlocksCleared`: the life of this incarnation begins with an empty cache.
    """

    def __init__(
        self, incarnation: str, *, form: Form, buffer_steps: int, max_queue_size: int
    ) -> None:
        self._incarnation = incarnation
        self._form: Form = form
        self._max_queue_size = max_queue_size
        self._queue: deque[_Waiting] = deque()
        self._latest: deque[NumberedPayload] = deque(maxlen=buffer_steps)
        self._mirror = CacheMirror()
        # The last number that the mirror has heard; batch 0 clears what is empty from the start.
        self._stands_at = 0
        self._next = 0
        # Held while a batch moves from the queue into the mirror: both threads may do that.
        self._lock = threading.Lock()
        self.num_dropped = 0
        self.append((AllBlocksCleared(),))

    @property
    def is_empty(self) -> bool:
        """True when nothing waits to be taken."""
        return not self._queue

    def append(self, events: Sequence[Event]) -> None:
        """One more batch, or several of bounded size. A full queue's oldest one is not sent.

        Consumers see the gap in the numbers, and the snapshot has what they missed.
        """
        for batch in batches(events):
            self._append(batch)

    def _append(self, events: tuple[Event, ...]) -> None:
        if len(self._queue) >= self._max_queue_size:
            with self._lock:
                if len(self._queue) >= self._max_queue_size:
                    self._to_mirror()
                    self.num_dropped += 1
        self._queue.append(_Waiting(self._next, time.time(), events))
        self._next += 1

    def take(self) -> NumberedPayload | None:
        """The next batch to send, which can be replayed from now on; None if there is none."""
        with self._lock:
            if not self._queue:
                return None
            sequence, ts, events = self._to_mirror()
        taken = NumberedPayload(sequence, self._encode(ts, events))
        self._latest.append(taken)
        return taken

    def replay(self, start: int) -> Iterator[NumberedPayload]:
        """The latest batches that were taken, from number `start` on, as they are now."""
        return iter([taken for taken in self._latest if taken.sequence >= start])

    def snapshot(self) -> Iterator[NumberedPayload]:
        """Batches that make the state as it is now, at least one; all have the state's number.

        That is the number of the batch that was taken, or dropped, last; 0 before the first, never
        that of an answer's end.
        """
        with self._lock:
            sequence, state = self._stands_at, self._mirror.copy()
        return self._encoded(sequence, state)

    def _encoded(self, sequence: int, state: CacheMirror) -> Iterator[NumberedPayload]:
        parts = state.drain(SNAPSHOT_BYTES)
        for events in chain([next(parts, [])], parts):
            yield NumberedPayload(sequence, self._encode(time.time(), tuple(events)))

    def _to_mirror(self) -> _Waiting:
        waiting = self._queue.popleft()
        self._mirror.apply(waiting.events)
        self._stands_at = waiting.sequence
        return waiting

    def _encode(self, ts: float, events: tuple[Event, ...]) -> bytes:
        return encode(EventBatch(ts, events, incarnation=self._incarnation), self._form)
