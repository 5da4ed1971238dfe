"""The blocks and checkpoints of all nodes, as their KV events tell, and the prefixes they make.

The thread that receives events writes, the event loop asks; both hold the lock for short pieces.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from proxy.routing.block_table import SLICE, BlockTable, CheckpointTable, by_name
from proxy.routing.layout_index import START, TIERS, Layout, LayoutIndex, Lengths
from proxy.routing.prompt import NO_HIT, NodeHit, RoutedPrompt
from serving.kv_events.wire import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
)
from serving.rpc.messages import KVEventsInfo

MAX_ENTRIES: Final = 2**22
"""Hash blocks and checkpoints of one node, about half a gigabyte; more are not taken in."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One life of one node in the index: its bit, and how many blocks and checkpoints it has."""

    number: int
    bit: int
    index: LayoutIndex
    num_entries: int = 0


class PrefixIndex:
    """An `EventSink`, and the answer to what each node holds of a prompt.

    It promises no more than the nodes have announced. Nodes whose model, hash block size, seed and
    groups are equal share tables.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: dict[Layout, LayoutIndex] = {}
        self._slots: dict[str, _Slot] = {}
        self._names: dict[int, str] = {}
        self._numbers = count()
        self._free: list[int] = []
        self._sweeps: deque[Iterator[None]] = deque()

    def set_node(self, name: str, info: KVEventsInfo) -> None:
        """Events of `name` are about these groups; what was known under others is forgotten."""
        with self._lock:
            index = self._layouts.setdefault(layout := Layout.of(info), LayoutIndex(layout))
            slot = self._slots.get(name)
            if slot is None or slot.index is not index:
                self._begin(name, index)

    def remove_node(self, name: str) -> None:
        """Forgets a node; its events are passed over from now on."""
        with self._lock:
            self._retire(name)

    def clear(self, name: str) -> None:
        """Nothing is known of what `name` holds. Takes no time, whatever it held."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None and slot.num_entries:
                self._begin(name, slot.index)

    def doubt(self, name: str, now: float) -> None:
        """Of Tandem's nodes nothing doubtful is kept: their state is asked for."""
        self.clear(name)

    def tick(self, name: str, now: float) -> None:
        """Nothing here depends on time."""

    def apply(self, name: str, events: Sequence[Event]) -> None:
        """Takes in events of one node, in order."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear(name)
            else:
                self._apply(name, event)
        with self._lock:
            # One slice of what is left to do for slots that have ended.
            if self._sweeps:
                try:
                    next(self._sweeps[0])
                except StopIteration:
                    self._sweeps.popleft()

    def hits(self, prompt: RoutedPrompt) -> dict[str, NodeHit]:
        """By node what it holds of the prompt; nodes that hold nothing are left out.

        Hashes the prompt if that was not done yet.
        """
        with self._lock:
            indexes = [index for index in self._layouts.values() if index.nodes]
        # Hashing takes longer than the lock may be held.
        for index in indexes:
            prompt.boundaries(index.key)
        found: dict[str, NodeHit] = {}
        with self._lock:
            for index in indexes:
                found.update(self._hits(index, prompt))
        return found

    @property
    def is_empty(self) -> bool:
        """True while no node tells of its cache: `hits` then hashes nothing."""
        with self._lock:
            return not any(index.nodes for index in self._layouts.values())

    @property
    def num_entries(self) -> dict[str, int]:
        """By node the hash blocks and checkpoints that it holds, in all groups and tiers."""
        with self._lock:
            return {name: slot.num_entries for name, slot in self._slots.items()}

    def _hits(self, index: LayoutIndex, prompt: RoutedPrompt) -> dict[str, NodeHit]:
        tiers = index.tiers
        attention, resumable = index.find(prompt, tiers[:1])
        found = _by_name(attention, resumable, self._names)
        # First what the fastest tier alone gives, then what each slower one adds to it.
        for number, tier in enumerate(tiers[1:], 2):
            longer = _by_name(*index.find(prompt, tiers[:number]), self._names)
            discount = 1.0 - TIERS[tier]
            for name, hit in longer.items():
                known = found.get(name, NO_HIT)
                # Only what this tier adds counts less.
                found[name] = NodeHit(
                    hit.attention,
                    hit.resumable,
                    known.attention_discount + discount * (hit.attention - known.attention),
                    known.resumable_discount + discount * (hit.resumable - known.resumable),
                )
        return found

    def _apply(self, name: str, event: BlockStored | BlockRemoved) -> None:
        hashes, group, tier = event.block_hashes, event.group_idx or 0, event.medium or GPU
        for start in range(0, len(hashes), SLICE):
            part = hashes if len(hashes) <= SLICE else hashes[start : start + SLICE]
            with self._lock:
                slot = self._slots.get(name)
                if slot is None or tier not in TIERS or not 0 <= group < slot.index.num_groups:
                    return
                table = slot.index.table(group, tier)
                if isinstance(event, BlockRemoved):
                    slot.num_entries -= table.remove(slot.bit, part)
                elif slot.num_entries + len(part) <= MAX_ENTRIES:
                    slot.num_entries += _store(slot, table, event, digests=part)

    def _begin(self, name: str, index: LayoutIndex) -> None:
        self._retire(name)
        number = self._free.pop() if self._free else next(self._numbers)
        slot = self._slots[name] = _Slot(number, 1 << number, index)
        self._names[number] = name
        index.nodes |= slot.bit

    def _retire(self, name: str) -> None:
        """Ends a node's slot at once; its bit is taken out of the tables piece by piece, later."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        slot.index.nodes &= ~slot.bit
        del self._names[slot.number]
        if slot.num_entries:
            self._sweeps.append(self._sweep_out(slot))
        else:
            self._end(slot)

    def _sweep_out(self, slot: _Slot) -> Iterator[None]:
        for table in slot.index.tables:
            yield from table.sweep(slot.bit)
        self._end(slot)

    def _end(self, slot: _Slot) -> None:
        # Only now may another node get the number.
        self._free.append(slot.number)
        layout = slot.index.layout
        # Tables that are empty keep their room, so they go with the last node of a layout.
        if not slot.index.nodes and self._layouts.get(layout) is slot.index:
            del self._layouts[layout]


def _store(
    slot: _Slot, table: BlockTable, event: BlockStored, *, digests: Sequence[BlockHash]
) -> int:
    """How many the node did not hold before; what is of no hash block is passed over."""
    size, length = slot.index.key.hash_block_size, event.block_size
    if length == size:
        return table.store(slot.bit, digests)
    if not isinstance(table, CheckpointTable) or len(digests) > 1 or not 0 < length < size:
        return 0
    parent = event.parent_block_hash or START
    return table.store_inside(slot.bit, digests[0], boundary=parent, length=length)


def _by_name(
    attention: Lengths, resumable: Lengths, names: Mapping[int, str]
) -> dict[str, NodeHit]:
    states, found = by_name(resumable, names), by_name(attention, names)
    hits = {name: NodeHit(tokens, states.pop(name, 0)) for name, tokens in found.items()}
    # Inside a block a window may begin later than at the boundary before it.
    hits.update((name, NodeHit(0, tokens)) for name, tokens in states.items())
    return hits
