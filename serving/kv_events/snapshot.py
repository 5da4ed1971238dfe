"""The announced state of a cache, rebuilt from its events, for consumers that come late."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from serving.kv_events.wire import MAMBA, BlockHash, BlockRemoved, BlockStored, Event

TOKEN_BYTES = 4
_HASH_BYTES = 64  # at most, with what else belongs to a block


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
    return _HASH_BYTES + len(item[1].tokens)


def _stored(tier: _Tier, table: _Table, run: _Run) -> BlockStored:
    tokens = array("I", b"".join(block.tokens for _, block in run))
    extra = tuple(block.extra_keys for _, block in run)
    return BlockStored(
        tuple(block_hash for block_hash, _ in run),
        run[0][1].parent,
        tuple(tokens),
        run[0][1].size,
        lora_id=None,
        medium=tier.medium,
        lora_name=None,
        extra_keys=extra if any(extra) else None,
        group_idx=tier.group_idx,
        kv_cache_spec_kind=table.kind,
        kv_cache_spec_sliding_window=table.sliding_window,
    )
