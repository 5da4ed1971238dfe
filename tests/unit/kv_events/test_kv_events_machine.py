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

from serving.kv_events.event_log import EventLog, NumberedPayload
from serving.kv_events.follower import ANSWER_S, QUIET_S, RETRY_S, Question, SourceFollower
from serving.kv_events.wire import END_SEQUENCE, SNAPSHOT, Event, EventBatch, Form, encode
from tests.support.cache.announced_cache import FULL, WINDOW, AnnouncedCache, HeardBlocks

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

    @initialize(
        form=st.sampled_from(["map", "array"]),
        buffer=st.integers(1, 6),
        queue=st.integers(1, 3),
        late=st.booleans(),
        is_known=st.booleans(),
        ends_in_silence=st.booleans(),
    )
    def begin(
        self,
        form: Form,
        buffer: int,
        queue: int,
        *,
        late: bool,
        is_known: bool,
        ends_in_silence: bool,
    ) -> None:
        self.ends_in_silence = ends_in_silence
        self.form, self.buffer, self.queue = form, buffer, queue
        self.num_lives = 0
        self.live: list[NumberedPayload] = []
        self.past: list[NumberedPayload] = []
        self.now = 0.0
        self.sink = HeardBlocks()
        self.asked: Question | None = None
        self.answer: list[NumberedPayload] = []
        self.restart()
        if late:
            for number in range(8):
                self.store((1, 2, 1, 2, 1)[: number % 5 + 1], 0, FULL, None)
                self.send()
        self.live = []
        self.follower = SourceFollower("node", self.sink, True, now=self.now)
        if is_known:
            self.be_answered()

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

    @rule(
        text=TEXTS,
        start=st.integers(0, 8),
        group=st.sampled_from([FULL, WINDOW]),
        salt=st.sampled_from([None, "s"]),
    )
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
        if self.follower.question is not self.asked:
            self.asked, self.answer = self.follower.question, []

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

    @rule()
    def be_answered(self) -> None:
        """A question is most often answered at once and as a whole."""
        self.look_at_request()
        self.ask()
        self.deliver_answer(FAR)

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
        if self.ends_in_silence:  # no later number tells that the last ones are lost
            self.live.clear()
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


EVERYDAY = settings(max_examples=100, stateful_step_count=40)
MANY = settings(max_examples=1500, stateful_step_count=60, derandomize=False)


@pytest.mark.parametrize("machine", [EventsMachine, ForeignMachine])
def test_the_sink_holds_what_was_announced(machine: type[EventsMachine]) -> None:
    run_machine(machine, settings=EVERYDAY)


@pytest.mark.long
@pytest.mark.parametrize("machine", [EventsMachine, ForeignMachine])
def test_the_sink_holds_what_was_announced_in_other_runs(machine: type[EventsMachine]) -> None:
    run_machine(machine, settings=MANY)
