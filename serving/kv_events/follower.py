"""One publisher as a subscriber follows it: which batch is next, and how what is lost comes back.

Knows no sockets: messages and times come in, calls of the sink and one wanted question come out.
"""

import time
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from math import inf
from typing import Protocol

import msgspec

from engine.errors import KVEventError
from serving.kv_events.wire import (
    END_SEQUENCE,
    SEQUENCE_BYTES,
    SNAPSHOT,
    AllBlocksCleared,
    Event,
    EventBatch,
    decode,
)

MAX_WAITING = 10_000
MAX_WAITING_BYTES = 8 * 2**20
"""Batches, and their bytes, that are kept while a question is answered; later ones count as lost.
They are kept as they came, since decoded ones may take many times as much."""
ANSWER_S = 5.0
"""The longest wait for the next message of an answer."""
RETRY_S = 5.0
"""From a question that failed to the next one."""
QUIET_S = 2.0
"""Silence after which a publisher is asked whether its last batch is the one that came last."""


class EventSource(msgspec.Struct, frozen=True):
    """The addresses of one publisher; without `replay_endpoint` no gap can be repaired.

    `is_foreign`: an engine of another project, whose events are read as `EngineStored`.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    is_foreign: bool = False


class EventSink(Protocol):
    """The follower of the caches of many publishers. Called from one thread, briefly."""

    def apply(self, name: str, events: Sequence[Event]) -> None:
        """Changes of the cache of `name`, in order; removals of unknown blocks are possible."""

    def clear(self, name: str) -> None:
        """Nothing is known of the cache of `name` any more."""

    def doubt(self, name: str, now: float) -> None:
        """Events of `name` are lost for good: some of what is known may be gone since.

        It may be kept for a while if it is likely; nothing ever repairs it. `now`, here and below,
        in monotonic seconds.
        """

    def tick(self, name: str, now: float) -> None:
        """Time has passed."""


class SourceStats(msgspec.Struct, frozen=True):
    """One source since it was added.

    `num_gaps_lost`: gaps after which its blocks were forgotten, or doubted, and not fetched again.
    `lag_s`: from the publisher's clock to ours, of the last live batch. `is_synced`: the sink knows
    all that the source announced. `num_unplaced`: announced blocks of which nobody knows what comes
    before them; none of our own nodes.
    """

    num_events: int = 0
    num_garbage: int = 0
    num_gaps_repaired: int = 0
    num_gaps_lost: int = 0
    lag_s: float = 0.0
    is_synced: bool = False
    num_unplaced: int = 0


class Asking(Enum):
    """The aim of a question."""

    REPLAY = auto()  # batches from the last one on, which is there to be compared
    SNAPSHOT = auto()  # the state
    EVERYTHING = auto()  # all batches from 0 on, of a publisher that knows no snapshots


class Question(msgspec.Struct, eq=False):
    """A request to a replay endpoint, to be sent over a connection of its own.

    `word`: its 8 bytes. `deadline`: monotonic seconds for the next message of the answer. `next`:
    the batch that was missing when it was made.
    """

    kind: Asking
    word: bytes
    deadline: float
    next: int | None
    is_answered: bool = False


class SourceFollower:
    """Calls `sink` with every batch of one publisher once and in order, or begins anew.

    `question`: what shall be asked now, or None; another object is another question. The sink knows
    nothing that the publisher had not announced, and nothing that it was heard to take back.
    `is_foreign`: as in `EventSource`.
    """

    def __init__(
        self,
        name: str,
        sink: EventSink,
        has_replay: bool,
        *,
        now: float,
        is_foreign: bool = False,
    ) -> None:
        self.name = name
        self.question: Question | None = None
        self._sink = sink
        self._has_replay = has_replay
        self._is_foreign = is_foreign
        self._now = now
        self._quiet_since = now
        self._retry_at = inf  # when to ask for the state again
        self._next: int | None = None  # the number to apply; None: whichever comes
        self._last_ts: float | None = None  # of batch `_next` - 1, unless a snapshot held it
        self._snapshot_at = 0  # the number of the snapshot that comes in
        self._is_new = True  # no incarnation was heard of
        self._incarnation: str | None = None
        self._waiting: dict[int, bytes] = {}  # by number; each was decoded once, so all can be
        self._waiting_bytes = 0
        self._is_complete = False  # the sink has all that was announced before `_next`
        self._has_gap = False  # to be counted when it is known how it ends
        self._num_events = self._num_garbage = self._num_repaired = self._num_lost = 0
        self._lag_s = 0.0
        self._forget()
        if has_replay:
            self._ask(Asking.SNAPSHOT)

    @property
    def stats(self) -> SourceStats:
        """The counters as they are now."""
        return SourceStats(
            self._num_events,
            self._num_garbage,
            self._num_repaired,
            self._num_lost,
            self._lag_s,
            self._is_complete and not self._has_gap,
        )

    @property
    def next_at(self) -> float:
        """Monotonic seconds at which `tick` has something to do; infinite for never."""
        if self.question is not None:
            return self.question.deadline
        if not self._has_replay:
            return inf
        return min(self._quiet_since + QUIET_S, self._retry_at)

    def garbled(self) -> None:
        """A message has come that has no number."""
        self._num_garbage += 1

    def heard(self, sequence: int, payload: bytes, now: float) -> None:
        """A live message has come at `now`, in monotonic seconds."""
        self._now = self._quiet_since = now
        batch = self._decoded(payload)
        if batch is None:
            self._miss(sequence)
            return
        if self._is_restart(sequence, batch):
            self._restart(batch.incarnation)
        self._lag_s = max(0.0, time.time() - batch.ts)
        self._follow(sequence, batch, payload)

    def answered(self, sequence: int, payload: bytes, now: float) -> None:
        """A message that answers `question` has come."""
        self._now = now
        question = self.question
        if question is None:
            return
        if sequence == END_SEQUENCE:
            self._end(question)
            return
        question.deadline = now + ANSWER_S
        batch = self._decoded(payload)
        if batch is None:
            # A batch that cannot be read may be passed over by the state after it.
            self._start_over() if question.kind is Asking.REPLAY else self._fail()
        elif not self._is_new and batch.incarnation != self._incarnation:
            self._restart(batch.incarnation)
        else:
            self._is_new, self._incarnation = False, batch.incarnation
            take = self._load if question.kind is Asking.SNAPSHOT else self._repeat
            take(question, sequence, batch)

    def tick(self, now: float) -> None:
        """Time has passed: gives up what takes too long, and asks what is due."""
        self._now = now
        self._sink.tick(self.name, now)
        if now < self.next_at:
            return
        if self.question is not None:
            self._fail()
        elif now >= self._retry_at or self._next is None:
            self._ask(Asking.SNAPSHOT)
        else:
            # A silent publisher may have said something that was lost, or be another one by now.
            self._ask(Asking.REPLAY)

    # --- live batches ------------------------------------------------------------------------

    def _decode(self, payload: bytes) -> EventBatch:
        return decode(payload, is_foreign=self._is_foreign)

    def _decoded(self, payload: bytes) -> EventBatch | None:
        try:
            return self._decode(payload)
        except KVEventError:
            self._num_garbage += 1
            return None

    def _is_restart(self, sequence: int, batch: EventBatch) -> bool:
        if self._is_new:
            self._is_new, self._incarnation = False, batch.incarnation
        if batch.incarnation is not None or self._incarnation is not None:
            return batch.incarnation != self._incarnation
        # Other projects name no incarnation: an earlier number at a later time is a new life.
        is_earlier = self._next is not None and sequence < self._next
        return is_earlier and self._last_ts is not None and batch.ts > self._last_ts

    def _restart(self, incarnation: str | None) -> None:
        """Another life of the publisher, whose cache began empty; or a late word of an earlier one.

        The answer to the question after it comes from the one that lives.
        """
        self._incarnation = incarnation
        self._has_gap = False
        self._take_waiting()
        self._forget()
        self.question = None
        if self._has_replay:
            self._ask(Asking.SNAPSHOT)

    def _follow(self, sequence: int, batch: EventBatch, payload: bytes) -> None:
        """Apply a batch now, or keep it until an answer is complete; `payload` is its bytes."""
        is_next = sequence == self._next
        if self.question is not None and self.question.kind is not Asking.REPLAY:
            # The state may prove older than this batch, or never come, and then it is needed.
            self._keep(sequence, payload)
            if is_next:
                self._apply(sequence, batch)
            else:
                self._miss(sequence)
        elif is_next or self._next is None:
            self._apply(sequence, batch)
            while (kept := self._waiting.pop(sequence := sequence + 1, None)) is not None:
                self._waiting_bytes -= len(kept)
                self._apply(sequence, self._decode(kept))
        elif sequence > self._next:
            self._keep(sequence, payload)
            self._miss(sequence)

    def _miss(self, sequence: int) -> None:
        """Batch `sequence` is no use: it cannot be read, or others before it did not come."""
        if self._next is None or sequence < self._next:
            return
        self._has_gap = True
        if not self._has_replay:
            self._go_on()
        elif self.question is None:
            self._ask(Asking.REPLAY)

    def _keep(self, sequence: int, payload: bytes) -> None:
        is_full = len(self._waiting) >= MAX_WAITING or (
            self._waiting_bytes + len(payload) > MAX_WAITING_BYTES
        )
        # What finds no room is asked for again, like all that is lost.
        if sequence not in self._waiting and not is_full:
            self._waiting[sequence] = payload
            self._waiting_bytes += len(payload)

    def _take_waiting(self) -> Iterator[tuple[int, EventBatch, bytes]]:
        """Takes the kept batches, in order; each is decoded when its turn comes."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        return ((each, self._decode(waiting[each]), waiting[each]) for each in sorted(waiting))

    def _apply(self, sequence: int, batch: EventBatch) -> None:
        self._hand_over(batch)
        self._next, self._last_ts = sequence + 1, batch.ts
        starts = any(isinstance(event, AllBlocksCleared) for event in batch.events)
        self._is_complete |= starts or sequence == 0

    def _hand_over(self, batch: EventBatch) -> None:
        self._sink.apply(self.name, batch.events)
        self._num_events += len(batch.events)
        self._num_garbage += batch.num_unknown

    def _forget(self) -> None:
        self._sink.clear(self.name)
        self._begin()

    def _doubt(self) -> None:
        self._sink.doubt(self.name, self._now)
        self._begin()

    def _begin(self) -> None:
        self._next = self._last_ts = None
        self._is_complete = False

    # --- questions ---------------------------------------------------------------------------

    def _ask(self, kind: Asking) -> None:
        # From the last batch on: if it differs from ours, so does the publisher.
        start = max(0, (self._next or 0) - 1) if kind is Asking.REPLAY else 0
        word = SNAPSHOT if kind is Asking.SNAPSHOT else start.to_bytes(SEQUENCE_BYTES, "big")
        self.question = Question(kind, word, self._now + ANSWER_S, self._next)
        self._quiet_since = self._now
        if kind is Asking.SNAPSHOT:
            self._retry_at = inf

    def _repeat(self, question: Question, sequence: int, batch: EventBatch) -> None:
        """A batch of a replay."""
        if question.kind is Asking.EVERYTHING:
            if sequence != 0:
                # Who names its incarnation knows snapshots: it had no state yet when it was asked.
                self._refuse() if batch.incarnation is None else self._fail()
                return
            # All from the beginning is as good as a state, and goes on as any replay.
            self._forget()
            self._next, question.kind = 0, Asking.REPLAY
        assert self._next is not None
        is_last = sequence == self._next - 1
        if is_last and self._last_ts is not None and batch.ts != self._last_ts:
            self._restart(batch.incarnation)
        elif sequence > self._next:
            self._start_over()  # what is missing has left the publisher's buffer
        else:
            question.is_answered = True
            if sequence == self._next:
                self._follow(sequence, batch, b"")  # applied at once, so never kept

    def _load(self, question: Question, sequence: int, batch: EventBatch) -> None:
        """A part of a snapshot."""
        if not question.is_answered:
            self._forget()
            question.is_answered, self._snapshot_at = True, sequence
        if sequence == self._snapshot_at:
            self._hand_over(batch)
        else:
            self._fail()

    def _end(self, question: Question) -> None:
        """The answer is complete, or there is none."""
        if question.kind is Asking.SNAPSHOT and not question.is_answered:
            self._ask(Asking.EVERYTHING)
            return
        if question.kind is Asking.REPLAY:
            is_unknown = not question.is_answered and self._next != 0
            is_stuck = bool(self._waiting) and self._next == question.next
            if is_unknown or is_stuck:
                self._start_over()
                return
        else:
            # A publisher without any batch has announced nothing yet.
            if not question.is_answered:
                self._forget()
            self._next = self._snapshot_at + 1 if question.is_answered else 0
            self._is_complete = True
        self._num_repaired += self._has_gap
        self._has_gap = False
        self.question = None
        for waiting in self._take_waiting():
            self._follow(*waiting)

    def _start_over(self) -> None:
        """Batches are lost for good: the state will do, which has all that was heard by now."""
        self._take_waiting()
        self._doubt()
        self._ask(Asking.SNAPSHOT)

    def _refuse(self) -> None:
        """The publisher knows no snapshot, and its buffer no beginning."""
        self.question = None
        self._go_on_if_lost()

    def _fail(self) -> None:
        """No answer, or none that can be read."""
        self.question = None
        self._retry_at = self._now + RETRY_S
        self._is_complete = False
        self._go_on_if_lost()

    def _go_on_if_lost(self) -> None:
        if self._has_gap or self._next is None:
            self._go_on()
        else:
            self._take_waiting()  # all of it was applied when it came

    def _go_on(self) -> None:
        """Doubt all, and follow what comes: a part of the state."""
        self._num_lost += self._has_gap
        self._has_gap = False
        self._doubt()
        for sequence, batch, _ in self._take_waiting():
            if self._next not in (None, sequence):
                self._num_lost += 1
                self._doubt()
            self._apply(sequence, batch)
