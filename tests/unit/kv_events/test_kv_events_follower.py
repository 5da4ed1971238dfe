"""A follower after one gap, restart or silence: what it forgets at once, asks for and bounds."""

import tracemalloc

from serving.kv_events.follower import (
    ANSWER_S,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    QUIET_S,
    RETRY_S,
    SourceFollower,
)
from serving.kv_events.wire import (
    END_SEQUENCE,
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    encode,
)
from tests.support.cache.announced_cache import HeardBlocks

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
        return None if self.follower.question is None else self.follower.question.word

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


def test_a_publisher_that_was_asked_before_its_first_batch_is_asked_for_its_state_again() -> None:
    """It had no state then, and its buffer has lost the beginning since."""
    node = Following(has_replay=True)
    node.answer(END_SEQUENCE)
    assert node.asks == bytes(8)
    node.hear(4, C, ts=3, life="x")
    node.answer(3, B, ts=2, life="x")
    assert (node.held, node.follower.stats.is_synced) == (b"c", False)
    node.follower.tick(RETRY_S)
    assert node.asks == SNAPSHOT
    node.answer(4, A, B, C, life="x")
    node.answer(END_SEQUENCE)
    assert (node.held, node.follower.stats.is_synced) == (b"abc", True)


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


def test_what_waits_is_kept_as_bytes_and_not_as_the_objects_that_it_becomes() -> None:
    node = Following(has_replay=True)
    short = BlockRemoved(tuple(b"%02d" % (n % 100) for n in range(100_000)))
    payload = encode(EventBatch(1.0, (short,), incarnation="one"))
    tracemalloc.start()
    try:
        for number in range(0, 120, 2):
            node.follower.heard(number, bytes(bytearray(payload)), 0.0)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * MAX_WAITING_BYTES


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
    assert (node.held, node.follower.question, node.follower.stats.is_synced) == (b"a", None, True)


def test_no_answer_keeps_what_is_sure_and_is_asked_for_again() -> None:
    node = Following(has_replay=True)
    node.hear(3, A, ts=1, life="one")
    assert node.held == b""
    node.follower.tick(ANSWER_S)
    assert (node.held, node.asks) == (b"a", None)
    node.follower.tick(ANSWER_S + RETRY_S)
    node.hear(4, B, ts=1, life="one")  # goes on while the next question is open
    assert (node.held, node.asks) == (b"ab", SNAPSHOT)
    node.follower.tick(2 * ANSWER_S + RETRY_S)
    assert (node.held, node.follower.question) == (b"ab", None)
    node.follower.tick(2 * ANSWER_S + 2 * RETRY_S)
    node.answer(4, A, B, C, life="one")
    node.answer(END_SEQUENCE)
    assert (node.held, node.follower.stats.is_synced) == (b"abc", True)


def test_a_question_after_silence_finds_another_life() -> None:
    node = Following(has_replay=True)
    node.answer(4, A, life="one")
    node.answer(END_SEQUENCE)
    node.follower.tick(QUIET_S)
    assert (node.held, node.asks) == (b"a", (4).to_bytes(8, "big"))
    node.answer(4, B, life="two")
    assert (node.held, node.asks) == (b"", SNAPSHOT)
