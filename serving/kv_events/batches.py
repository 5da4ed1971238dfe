"""Cuts the events of one step into batches that every consumer takes."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from serving.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event

MAX_BATCH_BYTES = 2 * 2**20
"""Of an encoded batch, at most: consumers may refuse long ones, ours those of 4 MiB."""
_EVENT_BYTES = 2048  # names, small values and a salt of 256 characters, at most
_HASH_BYTES = 70  # with an entry among the extra keys
_TOKEN_BYTES = 5


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
        num_bytes = _HASH_BYTES * len(event.block_hashes) + _TOKEN_BYTES * len(event.token_ids)
        return _EVENT_BYTES + num_bytes
    if isinstance(event, BlockRemoved):
        return _EVENT_BYTES + _HASH_BYTES * len(event.block_hashes)
    return _EVENT_BYTES


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
