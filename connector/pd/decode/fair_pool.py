"""Threads shared by peers round-robin: whatever one peer does, it takes only its part of them.

    waiting  a: 3 2 1   b: 1   c: 2 1        at most `total` run, at most `per_peer` of one peer;
    next     a1, b1, c1, a2, c2, a3          a full pool refuses instead of growing

Knows neither pulls nor messages.
"""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.errors import OverloadedError

Call = Callable[[], None]


@dataclass(slots=True, frozen=True)
class PoolLimits:
    """Calls that may run at once in all and for one peer, and that may wait in all."""

    total: int
    per_peer: int
    waiting: int


class FairPool:
    """Owner of its threads; all calls taken run. A call must not raise."""

    def __init__(self, limits: PoolLimits, name: str) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.total, thread_name_prefix=name)
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Call]] = OrderedDict()  # the next peer first
        self._running: Counter[str] = Counter()
        self.num_waiting = 0  # calls that have not begun

    @property
    def num_running(self) -> int:
        """Calls on a thread now."""
        with self._changed:
            return self._running.total()

    def submit(self, peer: str, call: Call) -> None:
        """Runs `call` when `peer` is next; never waits. Raises OverloadedError if too many wait."""
        # `_changed` is never held while a call runs or a thread is started.
        with self._changed:
            if self.num_waiting >= self._limits.waiting:
                raise OverloadedError(
                    f"{self.num_waiting} calls to peers wait already, {self._limits.waiting} may"
                )
            self._waiting.setdefault(peer, deque()).append(call)
            self.num_waiting += 1
        self._start_ready()

    def close(self) -> None:
        """Returns when every call has ended, the waiting ones too, and stops the threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self.num_waiting and not self._running.total())
        self._threads.shutdown(wait=True)

    def _start_ready(self) -> None:
        while (job := self._take_next()) is not None:
            self._threads.submit(self._run, *job)

    def _take_next(self) -> tuple[str, Call] | None:
        """The first call of the first peer that may run one more; the peer goes to the end."""
        with self._changed:
            if self._running.total() >= self._limits.total:
                return None
            limit = self._limits.per_peer
            peer = next((it for it in self._waiting if self._running[it] < limit), None)
            if peer is None:
                return None
            calls = self._waiting[peer]
            call = calls.popleft()
            # Its turn is over: all other peers that wait come before its next call.
            self._waiting.move_to_end(peer)
            if not calls:
                del self._waiting[peer]
            self.num_waiting -= 1
            self._running[peer] += 1
            return peer, call

    def _run(self, peer: str, call: Call) -> None:
        try:
            call()
        finally:
            with self._changed:
                self._running[peer] -= 1
                if not self._running[peer]:
                    del self._running[peer]
                self._changed.notify_all()
            self._start_ready()
