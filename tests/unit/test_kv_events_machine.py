"""A publisher and a follower over a network that loses, repeats, reorders and damages messages.

Whatever happened, the follower's sink holds exactly what the cache announced, once the network is
whole again and some time has passed. The real log and the real follower; only sockets are left out.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from engine.kv_events.event_log import EventLog, NumberedPayload
from engine.kv_events.follower import (
    ANSWER_S,
    MAX_WAITING,
    QUIET_S,
    RETRY_S,
    Request,
    SourceFollower,
)
from engine.kv_events.wire import (
    END_SEQUENCE,
    SNAPSHOT,
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    Form,
    encode,
)
from tests.announced_cache import FULL, WINDOW, AnnouncedCache, HeardBlocks

TEXTS = st.lists(st.integers(1, 2), min_size=1, max_size=9).map(tuple)
FAR = 10**6
END = NumberedPayload(END_SEQUENCE, b"")


class ForeignLog:
    """A publisher as vLLM has it: no incarnation, no first clear, no snapshot."""

    def __init__(self, form: Form) -> None:
        self._form: Form = form
        self._batches: list[NumberedPayload] = []
        self._num_taken = 0

    def append(self, events: list[Event]) -> None:
        number = len(self._batches)
        batch = EventBatch(float(number), tuple(events))
        self._batches.append(NumberedPayload(number, encode(batch, self._form)))

    def take(self) -> NumberedPayload | None:
        if self._num_taken == len(self._batches):
            return None
        self._num_taken += 1
        return self._batches[self._num_taken - 1]

    def replay(self, start: int) -> Iterator[NumberedPayload]:
        return iter(self._batches[start : self._num_taken])

    def snapshot(self) -> Iterator[NumberedPayload]:
        return iter(())


class EventsMachine(RuleBasedStateMachine):
    """`live`: messages on their way; `past`: all that were ever sent; `answer`: of one question."""

    is_foreign = False

    @initialize(form=st.sampled_from(["map", "array"]), buffer=st.integers(1, 6),
                queue=st.integers(1, 3), late=st.booleans())  # fmt: skip
    def begin(self, form: Form, buffer: int, queue: int, late: bool) -> None:
        self.form, self.buffer, self.queue = form, buffer, queue
        self.num_lives = 0
        self.live: list[NumberedPayload] = []
        self.past: list[NumberedPayload] = []
        self.now = 0.0
        self.sink = HeardBlocks()
        self.asked: Request | None = None
        self.answer: list[NumberedPayload] = []
        self.restart()
        if late:
            for number in range(8):
                self.store((1, 2, 1, 2, 1)[: number % 5 + 1], 0, FULL, None)
                self.send()
        self.live = []
        self.follower = SourceFollower("node", self.sink, True, now=self.now)

    # --- the publisher -----------------------------------------------------------------------

    def restart(self) -> None:
        self.num_lives += 1
        self.cache = AnnouncedCache()
        self.log: Any = (
            ForeignLog(self.form)
            if self.is_foreign
            else EventLog(
                f"life-{self.num_lives}",
                form=self.form,
                buffer_steps=self.buffer,
                max_queue_size=self.queue,
            )
        )

    @precondition(lambda self: not self.is_foreign)
    @rule()
    def die_and_begin_anew(self) -> None:
        self.restart()
        self.answer = []

    @rule(text=TEXTS, start=st.integers(0, 8), group=st.sampled_from([FULL, WINDOW]),
          salt=st.sampled_from([None, "s"]))  # fmt: skip
    def store(self, text: tuple[int, ...], start: int, group: int, salt: str | None) -> None:
        self.cache.store(text, min(start, len(text) - 1), group=group, salt=salt)
        self.publish()

    @rule(text=TEXTS)
    def keep_states(self, text: tuple[int, ...]) -> None:
        self.cache.keep_states(text)
        self.publish()

    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        self.cache.remove(number)
        self.publish()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.publish()

    def publish(self) -> None:
        if events := self.cache.recorder.take():
            self.log.append(events)

    @rule()
    def send(self) -> None:
        """Until it runs, batches wait, and find the queue full."""
        while batch := self.log.take():
            self.live.append(batch)
            self.past.append(batch)

    # --- the network -------------------------------------------------------------------------

    def deliver(self, message: NumberedPayload) -> None:
        self.now += 0.01
        self.follower.heard(message.sequence, message.payload, self.now)
        self.look_at_request()

    @rule(count=st.integers(1, 5))
    def deliver_next(self, count: int) -> None:
        for message in self.live[:count]:
            self.deliver(message)
        del self.live[:count]

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, FAR))
    def deliver_out_of_order(self, place: int) -> None:
        self.deliver(self.live.pop(place % len(self.live)))

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, FAR))
    def lose(self, place: int) -> None:
        self.live.pop(place % len(self.live))

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, FAR), junk=st.binary(max_size=8))
    def damage(self, place: int, junk: bytes) -> None:
        place %= len(self.live)
        self.live[place] = NumberedPayload(self.live[place].sequence, b"\xc1" + junk)

    @precondition(lambda self: self.past)
    @rule(place=st.integers(0, FAR))
    def repeat_an_old_one(self, place: int) -> None:
        """Also one of an earlier life."""
        self.deliver(self.past[place % len(self.past)])

    # --- questions ---------------------------------------------------------------------------

    def look_at_request(self) -> None:
        """Another question goes over another connection: what was on its way is gone."""
        if self.follower.request is not self.asked:
            self.asked, self.answer = self.follower.request, []

    @rule()
    def ask(self) -> None:
        if self.asked is not None and not self.answer and not self.asked.is_answered:
            start = int.from_bytes(self.asked.word, "big")
            is_snapshot = self.asked.word == SNAPSHOT
            batches = self.log.snapshot() if is_snapshot else self.log.replay(start)
            self.answer = [*batches, END]

    @rule(count=st.integers(1, 9))
    def deliver_answer(self, count: int) -> None:
        for _ in range(count):
            if not self.answer:
                return
            message = self.answer.pop(0)
            self.follower.answered(message.sequence, message.payload, self.now)
            self.look_at_request()

    @rule(kept=st.integers(0, 3))
    def lose_the_answer(self, kept: int) -> None:
        del self.answer[kept:]

    @precondition(lambda self: self.answer)
    @rule(place=st.integers(0, FAR))
    def damage_the_answer(self, place: int) -> None:
        place %= len(self.answer)
        self.answer[place] = NumberedPayload(self.answer[place].sequence, b"\xc1")

    @rule(seconds=st.sampled_from([0.1, ANSWER_S, QUIET_S + RETRY_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.follower.tick(self.now)
        self.look_at_request()

    # --- the end -----------------------------------------------------------------------------

    def heal(self) -> None:
        """Nothing is lost any more; questions are answered, and silence is asked about."""
        self.send()
        self.deliver_next(FAR)
        for _ in range(12):
            self.wait(0.0)
            self.answer = []
            if self.asked is not None and self.asked.is_answered:
                self.wait(ANSWER_S)  # half of its answer was lost
            self.ask()
            self.deliver_answer(FAR)
            self.send()
            self.deliver_next(FAR)
            if self.asked is None:
                self.wait(QUIET_S + RETRY_S)

    def teardown(self) -> None:
        self.heal()
        assert self.sink.held["node"] == self.cache.held
        assert self.follower.stats.is_synced


class ForeignMachine(EventsMachine):
    """The same with a publisher that has only a long buffer, in one life."""

    is_foreign = True


EVERYDAY = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
MANY = settings(max_examples=1500, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("machine", [EventsMachine, ForeignMachine])
def test_the_sink_holds_what_was_announced(machine: type[EventsMachine]) -> None:
    run_machine(machine, settings=EVERYDAY)


@pytest.mark.long
@pytest.mark.parametrize("machine", [EventsMachine, ForeignMachine])
def test_the_sink_holds_what_was_announced_in_other_runs(machine: type[EventsMachine]) -> None:
    run_machine(machine, settings=MANY)


# --- single cases ------------------------------------------------------------------------------


A, B, C = (BlockStored((each,), None, (1,), 1, group_idx=0) for each in (b"a", b"b", b"c"))


class Following:
    """A follower that is told messages by number, and what its sink holds."""

    def __init__(self, *, has_replay: bool) -> None:
        self.sink = HeardBlocks()
        self.follower = SourceFollower("node", self.sink, has_replay, now=0.0)

    def hear(self, number: int, *events: Event, ts: float, life: str | None = None) -> None:
        payload = encode(EventBatch(ts, events, incarnation=life))
        self.follower.heard(number, payload, 0.0)

    def answer(self, number: int, *events: Event, ts: float = 0.0, life: str | None = None) -> None:
        payload = encode(EventBatch(ts, events, incarnation=life)) if number >= 0 else b""
        self.follower.answered(number, payload, 0.0)

    @property
    def asks(self) -> bytes | None:
        return None if self.follower.request is None else self.follower.request.word

    @property
    def held(self) -> bytes:
        return b"".join(sorted(bytes(each[2]) for each in self.sink.held["node"].elements()))


def test_without_replay_a_gap_forgets_and_a_clear_synchronises() -> None:
    node = Following(has_replay=False)
    node.hear(7, A, ts=1)
    node.hear(8, B, ts=2)
    assert (node.held, node.follower.stats.is_synced) == (b"ab", False)
    node.hear(10, C, ts=3)
    assert (node.held, node.follower.stats.num_gaps_lost) == (b"c", 1)
    node.hear(9, B, ts=2)
    node.hear(11, AllBlocksCleared(), A, ts=4)
    assert (node.held, node.follower.stats.is_synced) == (b"a", True)


def test_an_unreadable_batch_without_replay_forgets_too() -> None:
    node = Following(has_replay=False)
    node.hear(0, A, ts=1)
    node.follower.heard(1, b"junk", 0.0)
    assert (node.held, node.follower.stats.num_garbage) == (b"", 1)
    node.hear(2, C, ts=3)
    assert node.held == b"c"


def test_a_new_life_clears_at_once_whatever_its_number() -> None:
    node = Following(has_replay=True)
    node.answer(4, A, B, life="one")
    node.answer(END_SEQUENCE)
    assert node.follower.stats.is_synced
    node.hear(5, C, ts=1, life="two")
    assert (node.held, node.asks == SNAPSHOT) == (b"", True)
    node.answer(6, B, life="two")
    node.answer(END_SEQUENCE)
    assert (node.held, node.follower.stats.num_gaps_repaired) == (b"b", 0)


def test_a_publisher_without_incarnations_that_begins_anew_is_noticed() -> None:
    node = Following(has_replay=False)
    node.hear(0, A, ts=1)
    node.hear(1, B, ts=2)
    node.hear(0, A, ts=1)  # a repeated message is no new life
    assert node.held == b"ab"
    node.hear(0, C, ts=3)
    assert (node.held, node.follower.stats.num_gaps_lost) == (b"c", 0)


def test_a_silent_publisher_is_asked_whether_it_is_still_the_same() -> None:
    node = Following(has_replay=True)
    for word in (SNAPSHOT, bytes(8)):  # it knows no snapshot, so all its batches are asked for
        assert node.asks == word
        node.answer(END_SEQUENCE) if word == SNAPSHOT else node.answer(0, A, ts=1)
    node.answer(END_SEQUENCE)
    assert (node.held, node.follower.stats.is_synced) == (b"a", True)
    node.follower.tick(QUIET_S)
    assert node.asks == bytes(8)
    node.answer(0, B, ts=9)  # not the batch 0 that we had
    assert (node.held, node.asks) == (b"", SNAPSHOT)


def test_a_publisher_that_has_lost_its_beginning_is_followed_from_now_on() -> None:
    node = Following(has_replay=True)
    node.hear(40, A, ts=1)
    node.answer(END_SEQUENCE)
    node.answer(30, B)
    assert (node.held, node.asks, node.follower.stats.is_synced) == (b"a", None, False)


def test_what_waits_for_an_answer_is_bounded() -> None:
    node = Following(has_replay=True)
    payload = encode(EventBatch(1.0, (A,), incarnation="one"))
    for number in range(1, MAX_WAITING + 10):
        node.follower.heard(number, payload, 0.0)
    node.answer(0, life="one")
    node.answer(END_SEQUENCE)
    assert node.follower.stats.num_events == MAX_WAITING
    node.hear(MAX_WAITING + 10, B, ts=1.0, life="one")
    assert node.asks == MAX_WAITING.to_bytes(8, "big")


def test_a_number_from_nowhere_costs_one_snapshot() -> None:
    node = Following(has_replay=True)
    node.answer(4, A, life="one")
    node.answer(END_SEQUENCE)
    node.hear(2**62, B, ts=1, life="one")
    assert node.asks == (4).to_bytes(8, "big")
    node.answer(4, A, ts=1, life="one")
    node.answer(END_SEQUENCE)
    node.answer(4, A, life="one")  # of a snapshot
    node.answer(END_SEQUENCE)
    assert (node.held, node.follower.request, node.follower.stats.is_synced) == (b"a", None, True)


def test_no_answer_keeps_what_is_sure_and_is_asked_for_again() -> None:
    node = Following(has_replay=True)
    node.hear(3, A, ts=1, life="one")
    assert node.held == b""
    node.follower.tick(ANSWER_S)
    assert (node.held, node.asks) == (b"a", None)
    node.follower.tick(ANSWER_S + RETRY_S)
    node.hear(4, B, ts=1, life="one")  # goes on while the next question is open
    assert (node.held, node.asks) == (b"ab", SNAPSHOT)
    node.answer(4, A, B, C, life="one")
    node.answer(END_SEQUENCE)
    assert (node.held, node.follower.stats.is_synced) == (b"abc", True)
