"""Threads shared by peers in turn: a peer that hangs holds up itself alone."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
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
    hanging = [pool.submit("hangs", gate.pass_through) for _ in range(10)]
    for _ in range(2):
        assert gate.entered.acquire(timeout=DEADLINE_S)
    healthy = [pool.submit("healthy", lambda: "here") for _ in range(20)]
    assert [future.result(DEADLINE_S) for future in healthy] == ["here"] * 20
    assert not gate.entered.acquire(blocking=False)
    assert not any(future.done() for future in hanging)
    gate.open()
    pool.close()
    assert all(future.done() for future in hanging)


def test_peers_have_their_turn_one_by_one(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=1, per_peer=1, waiting=100), "kv-test")
    order: list[str] = []
    first = pool.submit("first", gate.pass_through)
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        pool.submit(name[0], appending(order, name))
    gate.open()
    first.result(DEADLINE_S)
    pool.close()
    assert order == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_no_more_than_allowed_run_at_once_and_none_is_lost() -> None:
    limits = PoolLimits(total=4, per_peer=2, waiting=10_000)
    pool = FairPool(limits, "kv-test")
    lock, running, most = threading.Lock(), [0, 0, 0], [0, 0]

    def work(peer: int) -> int:
        with lock:
            running[peer] += 1
            most[0], most[1] = max(most[0], sum(running)), max(most[1], *running)
        with lock:
            running[peer] -= 1
        return peer

    futures = [pool.submit(str(i % 3), partial(work, i % 3)) for i in range(3_000)]
    assert [future.result(DEADLINE_S) for future in futures] == [i % 3 for i in range(3_000)]
    pool.close()
    assert most[0] <= limits.total
    assert most[1] <= limits.per_peer


def test_a_full_pool_refuses_and_goes_on(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=1, per_peer=1, waiting=2), "kv-test")
    pool.submit("a", gate.pass_through)
    taken = [pool.submit("b", lambda: 1) for _ in range(2)]
    with pytest.raises(OverloadedError, match="2 calls to peers wait"):
        pool.submit("c", lambda: 2)
    gate.open()
    wait(taken, DEADLINE_S)
    assert pool.submit("c", lambda: 3).result(DEADLINE_S) == 3
    pool.close()


def test_a_pool_for_few_peers_refuses_one_more_and_no_call_for_those_that_wait(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=1, per_peer=1, waiting=100, peers=1), "kv-test")
    taken = [pool.submit(peer, gate.pass_through) for peer in ("a", "b", "b", "b")]
    with pytest.raises(OverloadedError, match="1 peers wait already"):
        pool.submit("c", gate.pass_through)
    gate.open()
    wait(taken, DEADLINE_S)
    assert pool.submit("c", lambda: 3).result(DEADLINE_S) == 3
    pool.close()


def test_close_runs_what_waits_and_leaves_no_thread(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=2, per_peer=1, waiting=100), "kv-closing")
    futures = [pool.submit(str(i % 5), gate.pass_through) for i in range(20)]
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.open()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert all(future.done() for future in futures)
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-closing")]


def test_errors_reach_who_asked_and_cancelled_calls_do_not_run(gate: Gate) -> None:
    pool = FairPool(PoolLimits(total=1, per_peer=1, waiting=100), "kv-test")
    ran: list[str] = []
    pool.submit("a", gate.pass_through)
    wrong = pool.submit("b", lambda: 1 // 0)
    cancelled = pool.submit("b", appending(ran, "cancelled"))
    last = pool.submit("b", appending(ran, "last"))
    assert cancelled.cancel()
    gate.open()
    with pytest.raises(ZeroDivisionError):
        wrong.result(DEADLINE_S)
    last.result(DEADLINE_S)
    pool.close()
    assert ran == ["last"]
