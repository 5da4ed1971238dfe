"""A simulated node's KV events on their way to the index: late, and sometimes lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.cache.routing.agenda import Agenda
from proxy.routing.prefix_index import PrefixIndex
from serving.kv_events.wire import Event


@dataclass(slots=True, frozen=True)
class EventPath:
    """Seconds from node to index; the share of batches lost; seconds to repair a gap."""

    delay_s: float = 0.1
    loss: float = 0.0
    repair_s: float = 3.0


class EventFeed:
    """Batches of one node in sequence. A gap is seen by the batch after it, and repaired.

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
