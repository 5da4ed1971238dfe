"""A simulated node's KV events on their way to the index: late, and sometimes lost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.routing.agenda import Agenda
from engine.kv_cache.listener import Cached, CachedStates
from engine.kv_events.wire import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from proxy.routing.prefix_index import PrefixIndex


@dataclass(slots=True, frozen=True)
class EventPath:
    """Seconds from node to index; the share of batches lost; seconds to repair a gap."""

    delay_s: float = 0.1
    loss: float = 0.0
    repair_s: float = 3.0


class Announcer:
    """A listener that keeps what a cache announces, in whole hash blocks, until it is taken."""

    def __init__(self, hash_block_size: int) -> None:
        self._size = hash_block_size
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[int, ...],
        *,
        cache_salt: str | None = None,
    ) -> None:
        for group, hashes, length in self._announced(cached):
            known = None if cached.end <= length else parent
            self._events.append(BlockStored(hashes, known, (), length, medium=GPU, group_idx=group))

    def evicting(self, cached: Cached) -> None:
        """Said again by `removed`."""

    def removed(self, cached: Cached) -> None:
        for group, hashes, _ in self._announced(cached):
            self._events.append(BlockRemoved(hashes, GPU, group))

    def cleared(self) -> None:
        self._events = [AllBlocksCleared()]

    def _announced(self, cached: Cached) -> Iterator[tuple[int, tuple[bytes, ...], int]]:
        """(group, hashes, tokens that the last one covers); a partly filled block is none."""
        length = cached.end % self._size or self._size
        if isinstance(cached, CachedStates):
            for group in cached.groups:
                yield group, (cached.digest,), length
        elif length == self._size:
            yield cached.group, cached.digests, length


class EventFeed:
    """Batches of one node in sequence. A gap is seen by the batch behind it, and repaired.

    A repair clears the node and applies a snapshot, as a subscriber does without a replay; what
    arrives meanwhile is in the snapshot. Here the log of all events stands for it.
    """

    def __init__(
        self, name: str, index: PrefixIndex, *, agenda: Agenda, path: EventPath, random: Random
    ) -> None:
        self.num_repairs = 0
        self._name = name
        self._index = index
        self._agenda = agenda
        self._path = path
        self._random = random
        self._log: list[Event] = []
        self._num_sent = 0
        self._next = 0
        self._is_repairing = False

    def send(self, events: Sequence[Event]) -> None:
        """One batch, unless it is empty."""
        if not events:
            return
        sequence = self._num_sent
        self._num_sent += 1
        if self._path.loss:
            self._log += events
        if self._random.random() >= self._path.loss:
            self._agenda.after(self._path.delay_s, lambda: self._receive(sequence, events))

    def _receive(self, sequence: int, events: Sequence[Event]) -> None:
        if self._is_repairing or sequence < self._next:
            return
        if sequence > self._next:
            self._is_repairing = True
            self._agenda.after(self._path.repair_s, self._repair)
            return
        self._next += 1
        self._index.apply(self._name, events)

    def _repair(self) -> None:
        self._index.clear(self._name)
        self._index.apply(self._name, self._log)
        # Batches under way are in the snapshot.
        self._next, self._is_repairing = self._num_sent, False
        self.num_repairs += 1
