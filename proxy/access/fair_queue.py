"""Requests wait for their turn: tenants share what there is by weight, whoever sends more.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request starts in virtual time where the
tenant's previous one ended, or now; the one that starts first goes first.

    tenant a  |--1--|--2--|--3--|--4--|      order: a1 b1 a2 a3 b2 a4
    tenant b  |-----1-----|-----2-----|      b's requests are twice as large, or its weight half
              ------------------------> virtual time
"""

import asyncio
import heapq
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from engine.errors import OverloadedError

RETRY_AFTER_S: Final = 2
SPARE: Final = 64


@dataclass(slots=True, frozen=True)
class Share:
    """A tenant's right to be served: all of a lower `priority` go first."""

    tenant: str
    weight: float = 1.0
    priority: int = 0


@dataclass(slots=True, order=True)
class _Waiting:
    """One request that waits, in the order of the queue; it asks for `size` places.

    `length`: in virtual time.
    """

    priority: int
    start: float
    number: int
    size: int = field(compare=False)
    length: float = field(compare=False)
    tenant: str = field(compare=False)
    turn: "asyncio.Future[None]" = field(compare=False)


class FairQueue:
    """At most `max_running` sequences at once, 0 for any number; belongs to the event loop.

    When `max_waiting` requests wait, the tenant with the most of them loses its last one.
    """

    def __init__(self, max_running: int, max_waiting: int, timeout_s: float) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._free = max_running
        self._number = 0
        self._heap: list[_Waiting] = []
        self._by_tenant: dict[str, list[_Waiting]] = defaultdict(list)
        # Each priority has a virtual time of its own: a class that starves does not age.
        self._now: dict[int, float] = defaultdict(float)
        self._ends: dict[tuple[int, str], float] = {}

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    @property
    def num_running(self) -> int:
        """Sequences; 0 where they are not counted."""
        return self._max_running - self._free

    @asynccontextmanager
    async def place(self, share: Share, *, num_sequences: int, cost: float) -> AsyncIterator[None]:
        """Returns when it is this request's turn; `cost`: what it takes of the tenant's share.

        Raises OverloadedError when the queue is full or the turn does not come in time.
        """
        if not self._max_running:
            yield
            return
        # A request of more sequences than there are places gets all of them.
        size = min(num_sequences, self._max_running)
        await self._wait(share, size, cost)
        try:
            yield
        finally:
            self._free += size
            self._let_in()

    async def _wait(self, share: Share, size: int, cost: float) -> None:
        waiting = self._enqueue(share, size, cost)
        self._let_in()
        if self.num_waiting > self._max_waiting:
            self._drop_one()
        try:
            async with asyncio.timeout(self._timeout_s):
                await waiting.turn
        except BaseException as error:
            # The turn may have come in the very moment in which the caller left.
            if _has_come(waiting.turn):
                self._free += size
            else:
                self._give_up(waiting)
            self._let_in()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"no turn within {self._timeout_s:g} s", retry_after_s=RETRY_AFTER_S
                ) from error
            raise

    def _enqueue(self, share: Share, size: int, cost: float) -> _Waiting:
        place = (share.priority, share.tenant)
        start = max(self._now[share.priority], self._ends.get(place, 0.0))
        length = cost / share.weight
        self._ends[place] = start + length
        self._number += 1
        waiting = _Waiting(
            share.priority,
            start,
            self._number,
            size=size,
            length=length,
            tenant=share.tenant,
            turn=asyncio.get_running_loop().create_future(),
        )
        # Those that gave up stay in the heap until their turn: not more of them than of others.
        if len(self._heap) > 2 * self.num_waiting + SPARE:
            self._heap = [it for it in self._heap if not it.turn.done()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, waiting)
        self._by_tenant[share.tenant].append(waiting)
        return waiting

    def _let_in(self) -> None:
        """The first in order goes first, also where a smaller one behind it would fit."""
        while self._heap and (self._heap[0].turn.done() or self._heap[0].size <= self._free):
            first = heapq.heappop(self._heap)
            if first.turn.done():
                continue
            self._free -= first.size
            self._now[first.priority] = max(self._now[first.priority], first.start)
            self._leave(first)
            first.turn.set_result(None)
        if not self._heap and self._free == self._max_running:
            # Nobody is here, so nobody is ahead of others. (While somebody is, what each tenant
            # has had counts, also if it asks only when it has been served.)
            self._now.clear()
            self._ends.clear()

    def _drop_one(self) -> None:
        last = max(self._by_tenant.values(), key=len)[-1]
        # It may have been cancelled a moment ago, and leave by itself.
        if not last.turn.done():
            last.turn.set_exception(
                OverloadedError("too many requests wait: try again", retry_after_s=RETRY_AFTER_S)
            )
        self._leave(last)

    def _give_up(self, waiting: _Waiting) -> None:
        """What was not served does not count as the tenant's."""
        waiting.turn.cancel()
        self._leave(waiting)
        place = (waiting.priority, waiting.tenant)
        if place in self._ends:
            self._ends[place] -= waiting.length

    def _leave(self, waiting: _Waiting) -> None:
        mine = self._by_tenant.get(waiting.tenant, [])
        if waiting in mine:
            mine.remove(waiting)
        if not mine:
            self._by_tenant.pop(waiting.tenant, None)


def _has_come(turn: "asyncio.Future[None]") -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None
