"""Measured rates: the latest counts most, and a step counts for what it did."""

import threading
from collections.abc import Callable

import pytest

from engine.sched.stats import DecayingRate, StepRates
from engine.step import ScheduledRequest


def step(*counts: int) -> list[ScheduledRequest]:
    """A step of requests with so many tokens each."""
    return [ScheduledRequest(str(i), [0] * count, 0, ()) for i, count in enumerate(counts)]


def test_nothing_measured_is_zero_and_so_is_no_time() -> None:
    rate = DecayingRate()
    assert rate.per_s == 0.0
    rate.add(5, 0.0)
    assert rate.per_s == 0.0


def test_a_steady_rate_is_found_whatever_the_pieces() -> None:
    for seconds in (0.001, 1.0, 100.0):
        rate = DecayingRate()
        for _ in range(50):
            rate.add(70 * seconds, seconds)
        assert rate.per_s == pytest.approx(70)


def test_large_pieces_count_more_than_small_ones_and_new_ones_more_than_old_ones() -> None:
    rate = DecayingRate(horizon_s=10.0)
    rate.add(1000, 1.0)
    rate.add(0, 0.001)
    assert rate.per_s == pytest.approx(1000, rel=0.01)
    for _ in range(100):
        rate.add(10, 1.0)
    assert rate.per_s == pytest.approx(10, rel=0.01)


def test_threads_lose_nothing() -> None:
    rate = DecayingRate(horizon_s=1e12)

    def add() -> None:
        for _ in range(2000):
            rate.add(3, 1.0)

    run_all(*[add] * 8)
    assert rate.per_s == pytest.approx(3)
    assert rate._seconds == pytest.approx(16_000)


def run_all(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_steps_that_prefill_and_steps_that_only_decode_are_told_apart() -> None:
    rates = StepRates()
    rates.add(step(), 1.0)
    assert (rates.prefill.per_s, rates.decode.per_s) == (0.0, 0.0)
    rates.add(step(1, 1, 1), 0.5)
    assert [rates.prefill.per_s, rates.decode.per_s] == pytest.approx([0, 6])
    rates.add(step(1, 200, 1, 300), 2.0)  # decodes beside prefills cost them time, and no more
    assert [rates.prefill.per_s, rates.decode.per_s] == pytest.approx([250, 6])
