"""A limit on each of many short waits, for the price of one timer."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Patience:
    """Calls `give_up`, once, if a `with` block of it lasts longer than `limit_s` seconds.

    A timer for each wait would cost as much as the wait's own work where every token waits. This
    one's timer looks, when it ends, since when the present wait lasts, and begins anew.
    """

    __slots__ = ("_give_up", "_limit_s", "_loop", "_since", "_timer", "is_over")

    def __init__(self, limit_s: float, give_up: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False

    def __enter__(self) -> Self:
        self._since = self._loop.time()
        if self._timer is None and not self.is_over:
            self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._since = None

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return  # the next wait starts a timer
        left = self._since + self._limit_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.is_over = True
            self._give_up()
