"""The discrete events of a simulation: what happens next, and when."""

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """Simulated seconds. Of two actions at one time the one planned first happens first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Plans `action` for `delay_s` seconds from now."""
        heapq.heappush(self._planned, (self.now + delay_s, next(self._order), action))

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._planned:
            self.now, _, action = heapq.heappop(self._planned)
            action()
