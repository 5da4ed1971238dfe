"""Threads shared by peers in turn: a peer that hangs holds up itself alone."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from connector.pd.decode.fair_pool import FairPool, PoolLimits
from engine.errors import OverloadedError

DEADLINE_S = 20.0


class Gate:
    """Calls that hang until the gate is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Semaphore(0)

    def pass_through(self) -> None:
        self.entered.release()
        assert self._open.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def appending(order: list[str], name: str) -> Callable[[], None]:
    return lambda: order.append(name)


def test_a_peer_that_hangs_delays_no_other(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=3, per_peer=2, waiting=100), "kv-test")
    order: list[str] = []
    for _ in range(10):
        pool.submit("hangs", gate.pass_through)
    for _ in range(2):
        assert gate.entered.acquire(timeout=DEADLINE_S)
    done = threading.Event()
    for _ in range(20):
        pool.submit("healthy", appending(order, "here"))
    pool.submit("healthy", done.set)
    assert done.wait(DEADLINE_S)
    assert order == ["here"] * 20
    assert not gate.entered.acquire(blocking=False)
    assert (pool.num_running, pool.num_waiting) == (2, 8)
    gate.open()
    pool.close()
    assert (pool.num_running, pool.num_waiting) == (0, 0)


def test_peers_have_their_turn_one_by_one(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=1, per_peer=1, waiting=100), "kv-test")
    order: list[str] = []
    pool.submit("first", gate.pass_through)
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        pool.submit(name[0], appending(order, name))
    gate.open()
    pool.close()
    assert order == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_no_more_than_allowed_run_at_once_and_none_is_lost() -> None:
    limits = PoolLimits(total=4, per_peer=2, waiting=10_000)
    pool = FairPool(limits, "kv-test")
    lock, running, most, ran = threading.Lock(), [0, 0, 0], [0, 0], [0, 0, 0]

    def work(peer: int) -> None:
        with lock:
            running[peer] += 1
            most[0], most[1] = max(most[0], sum(running)), max(most[1], *running)
        with lock:
            running[peer] -= 1
            ran[peer] += 1

    for i in range(3_000):
        pool.submit(str(i % 3), partial(work, i % 3))
    pool.close()
    assert ran == [1_000] * 3
    assert most[0] <= limits.total
    assert most[1] <= limits.per_peer


def test_a_full_pool_refuses_and_goes_on(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=1, per_peer=1, waiting=2), "kv-test")
    order: list[str] = []
    pool.submit("a", gate.pass_through)
    assert gate.entered.acquire(timeout=DEADLINE_S)
    for _ in range(2):
        pool.submit("b", appending(order, "taken"))
    with pytest.raises(OverloadedError, match="2 calls to peers wait"):
        pool.submit("c", appending(order, "refused"))
    gate.open()
    pool.close()
    assert order == ["taken"] * 2


def test_close_runs_what_waits_and_leaves_no_thread(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=2, per_peer=1, waiting=100), "kv-closing")
    for i in range(20):
        pool.submit(str(i % 5), gate.pass_through)
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.open()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert gate.entered._value == 20
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-closing")]
