"""Sequences wait for their turn: tenants share what there is by weight, whoever sends more.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a sequence starts in virtual time where the
tenant's previous one ended, or now; the one that starts first goes first.

    tenant a  |--1--|--2--|--3--|--4--|      order: a1 b1 a2 a3 b2 a4
    tenant b  |-----1-----|-----2-----|      b's sequences are twice as large, or its weight half
              ------------------------> virtual time

A few places, one of eight, are kept while there is a tenant that holds fewer than these: whoever
comes to a cluster that another tenant fills begins at once.
"""

import asyncio
import heapq
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from engine.errors import OverloadedError

RETRY_AFTER_S: Final = 2
SPARE: Final = 64
KEPT_SHARE: Final = 8
"""One place of so many, but at least one where there are several, is kept."""


@dataclass(slots=True, frozen=True)
class Share:
    """A tenant's right to be served: all of a lower `priority` go first."""

    tenant: str
    weight: float = 1.0
    priority: int = 0


@dataclass(slots=True, order=True)
class _Waiting:
    """One sequence that waits, in the order of the queue. `length`: in virtual time.

    `is_first`: of its request; the others have a request that has begun.
    """

    priority: int
    start: float
    number: int
    length: float = field(compare=False)
    tenant: str = field(compare=False)
    is_first: bool = field(compare=False)
    turn: "asyncio.Future[None]" = field(compare=False)


class FairQueue:
    """At most `max_running` sequences at once, 0 for any number; belongs to the event loop.

    When `max_waiting` requests wait, the tenant with the most of them loses its last one.
    `num_tenants`: how many there may be, for whom places are kept.
    """

    def __init__(self, max_running: int, max_waiting: int, timeout_s: float) -> None:
        self.num_tenants = 1
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._held: Counter[str] = Counter()
        self._number = 0
        # By tenant those who wait, and how many requests they are.
        self._waiting: dict[str, list[_Waiting]] = defaultdict(list)
        self._num_firsts: Counter[str] = Counter()
        # Each priority has a virtual time of its own: a class that starves does not age.
        self._now: dict[int, float] = defaultdict(float)
        self._ends: dict[tuple[int, str], float] = {}

    @property
    def num_waiting(self) -> int:
        """Requests of which no sequence has begun."""
        return self._num_firsts.total()

    @property
    def num_running(self) -> int:
        """Sequences; 0 where they are not counted."""
        return self._held.total()

    async def take(self, share: Share, *, cost: float, is_first: bool = True) -> None:
        """Returns when a sequence has a place, until `give_back`.

        `cost`: what it takes of the tenant's share. The first one of a request raises
        OverloadedError when the queue is full or its turn does not come in time. The others wait as
        long as the request may take.
        """
        if not self._max_running:
            return
        waiting = self._enqueue(share, cost, is_first=is_first)
        self._let_in()
        if self.num_waiting > self._max_waiting:
            self._drop_one()
        try:
            async with asyncio.timeout(self._timeout_s if is_first else None):
                await waiting.turn
        except BaseException as error:
            turn = waiting.turn
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # It has come in the very moment in which the caller left.
                self.give_back(share)
            else:
                # It takes nothing of the tenant's share.
                turn.cancel()
                self._num_firsts[share.tenant] -= waiting.is_first
                place = (share.priority, share.tenant)
                if place in self._ends:
                    self._ends[place] -= waiting.length
                self._let_in()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"no turn within {self._timeout_s:g} s", retry_after_s=RETRY_AFTER_S
                ) from error
            raise

    def give_back(self, share: Share) -> None:
        """A place that was taken is free again."""
        if not self._max_running:
            return
        self._held[share.tenant] -= 1
        if not self._held[share.tenant]:
            del self._held[share.tenant]
        self._let_in()

    def _enqueue(self, share: Share, cost: float, *, is_first: bool) -> _Waiting:
        place = (share.priority, share.tenant)
        start = max(self._now[share.priority], self._ends.get(place, 0.0))
        length = cost / share.weight
        self._ends[place] = start + length
        self._number += 1
        waiting = _Waiting(
            share.priority,
            start,
            self._number,
            length=length,
            tenant=share.tenant,
            is_first=is_first,
            turn=asyncio.get_running_loop().create_future(),
        )
        queue = self._waiting[share.tenant]
        heapq.heappush(queue, waiting)
        self._num_firsts[share.tenant] += is_first
        # Those that gave up stay until their turn: not many more of them than of others.
        if len(queue) > 2 * sum(not it.turn.done() for it in queue[:SPARE]) + 2 * SPARE:
            queue[:] = [it for it in queue if not it.turn.done()]
            heapq.heapify(queue)
        return waiting

    def _let_in(self) -> None:
        """The first in order goes first, of the tenants that may have another place."""
        while (first := self._first()) is not None:
            heapq.heappop(self._waiting[first.tenant])
            self._held[first.tenant] += 1
            self._now[first.priority] = max(self._now[first.priority], first.start)
            self._num_firsts[first.tenant] -= first.is_first
            first.turn.set_result(None)
        if not self._held and not any(self._waiting.values()):
            # Nobody is here, so nobody is ahead of others. (While somebody is, what each tenant
            # has had counts, also if it asks only when it has been served.)
            for memory in (self._now, self._ends, self._waiting, self._num_firsts):
                memory.clear()

    def _first(self) -> _Waiting | None:
        heads = []
        for tenant, queue in self._waiting.items():
            while queue and queue[0].turn.done():
                heapq.heappop(queue)
            if queue and self._may_have_another(tenant):
                heads.append(queue[0])
        return min(heads, default=None)

    def _may_have_another(self, tenant: str) -> bool:
        free = self._max_running - self.num_running
        kept = max(1, self._max_running // KEPT_SHARE) if self._max_running > 1 else 0
        if self._held[tenant] < kept:
            return free > 0
        # What all tenants, this one included, have of the places that are kept for each of them.
        had = sum(min(kept, count) for count in self._held.values())
        lacked_by_others = max(0, self.num_tenants * kept - had)
        return free > min(kept, lacked_by_others)

    def _drop_one(self) -> None:
        tenant = max(self._num_firsts, key=lambda it: self._num_firsts[it])
        firsts = (it for it in self._waiting[tenant] if it.is_first and not it.turn.done())
        last = max(firsts, key=lambda it: it.number)
        last.turn.set_exception(
            OverloadedError("too many requests wait: try again", retry_after_s=RETRY_AFTER_S)
        )
        self._num_firsts[tenant] -= 1
        last.is_first = False  # it is counted no more


class Places:
    """The places of one request, one for each sequence; `cost` is that of a sequence."""

    def __init__(self, queue: FairQueue, share: Share, cost: float) -> None:
        self._queue = queue
        self._share = share
        self._cost = cost
        self._has_first = False

    @asynccontextmanager
    async def waited_for(self) -> AsyncIterator[None]:
        """Has the first place, for whichever sequence asks first; raises as `FairQueue.take`."""
        await self._queue.take(self._share, cost=self._cost)
        self._has_first = True
        try:
            yield
        finally:
            if self._has_first:  # no sequence has begun
                self._queue.give_back(self._share)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """The place of one sequence, until the block ends."""
        if not self._has_first:
            await self._queue.take(self._share, cost=self._cost, is_first=False)
        self._has_first = False
        try:
            yield
        finally:
            self._queue.give_back(self._share)
