"""A few turns at once, tenants one after another: a busy tenant delays only itself."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from engine.errors import OverloadedError

MAX_WAITING: Final = 256


class Turns:
    """At most `at_once` turns at once, at most `per_tenant` of one tenant; on the event loop.

    Tenants that wait get theirs one after the other, and the requests of one in order. A tenant of
    which `max_waiting` requests wait already gets no more in. Requests without a tenant ("") have a
    server to themselves: all turns are for them.
    """

    def __init__(
        self, at_once: int, *, per_tenant: int | None = None, max_waiting: int = MAX_WAITING
    ) -> None:
        self._free = at_once
        self._per_tenant = per_tenant or at_once
        self._max_waiting = max_waiting
        self._taken: Counter[str] = Counter()
        # The tenants in the order of their next turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str, timeout_s: float) -> AsyncIterator[None]:
        """Holds a turn of `tenant`.

        Raises OverloadedError where its queue is full, and TimeoutError where no turn comes in
        time.
        """
        await self.take(tenant, timeout_s)
        try:
            yield
        finally:
            self.give_back(tenant)

    def take_now(self, tenant: str) -> bool:
        """Takes a turn if there is one that nobody waits for; `give_back` ends it."""
        if not self._free or self._waiting or not self._may_have_another(tenant):
            return False
        self._free -= 1
        self._taken[tenant] += 1
        return True

    async def take(self, tenant: str, timeout_s: float) -> None:
        """As `turn`, until `give_back`."""
        async with asyncio.timeout(timeout_s):
            queue = self._waiting.setdefault(tenant, deque())
            if len(queue) >= self._max_waiting:
                raise OverloadedError(f"{len(queue)} requests of this tenant wait: try again")
            coming: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append(coming)
            self._let_in()
            try:
                await coming
            except asyncio.CancelledError:
                if coming.done() and not coming.cancelled():  # it came in the very moment
                    self.give_back(tenant)
                else:
                    self._forget(tenant, coming)
                raise

    def give_back(self, tenant: str) -> None:
        """Ends a turn that was taken."""
        self._free += 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._let_in()

    def _let_in(self) -> None:
        while self._free:
            tenant = next(filter(self._may_have_another, self._waiting), None)
            if tenant is None:
                return
            coming = self._waiting[tenant][0]
            self._waiting.move_to_end(tenant)
            self._forget(tenant, coming)
            if coming.done():  # it was cancelled a moment ago
                continue
            self._free -= 1
            self._taken[tenant] += 1
            coming.set_result(None)

    def _may_have_another(self, tenant: str) -> bool:
        return not tenant or self._taken[tenant] < self._per_tenant

    def _forget(self, tenant: str, coming: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and coming in queue:
            queue.remove(coming)
            if not queue:
                del self._waiting[tenant]
