"""A publisher's batches in order: their numbers, the latest of them, and the state they make."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from serving.kv_events.batches import batches
from serving.kv_events.snapshot import CacheMirror
from serving.kv_events.wire import AllBlocksCleared, Event, EventBatch, Form, encode

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
