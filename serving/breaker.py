"""A peer that fails in a row rests for a while; then one request tries it again.

    closed --failures in a row--> rests --pause--> one trial --it works--> closed
                                    ^--- it fails, twice the pause ---'

The proxy leaves a node alone so, which may well describe itself as ready, and a pair of nodes whose
hand-overs fail.
"""

import time
from collections.abc import Callable
from typing import Final

MIN_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0
MAX_FAILURES: Final = 3


class Breaker:
    """One peer's `num_failures` in a row; `max_failures` are too many. `clock` in seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_failures: int = MAX_FAILURES
    ) -> None:
        self._clock = clock
        self._max_failures = max_failures
        self.worked()

    @property
    def is_suspect(self) -> bool:
        """True from too many failures until a request works."""
        return self.num_failures >= self._max_failures

    @property
    def rest_s(self) -> float:
        """Seconds for which the peer should get no request; 0 while it may have one."""
        return max(0.0, self._until - self._clock()) if self.is_suspect else 0.0

    def worked(self) -> None:
        """A request ended well, or another process has taken the peer's place."""
        self.num_failures = 0
        self._pause_s = 0.0
        self._until = 0.0
        self._is_tried = False

    def began(self) -> None:
        """A request begins; while the peer is suspect it is the only one, unless it takes long."""
        if self.is_suspect and not self.rest_s:
            self._is_tried = True
            self._until = self._clock() + MAX_PAUSE_S

    def unjudged(self) -> None:
        """A request ended by its own fault, or another peer's: the next one may be the trial."""
        if self._is_tried:
            self._is_tried = False
            self._until = self._clock()

    def failed(self, *, lasting: bool = False) -> bool:
        """A request failed, not by its own fault; true if the peer begins to rest.

        `lasting`: the next one would fail as well, so that this failure is one too many.
        """
        self.num_failures += 1
        if lasting:
            self._max_failures = 1
        # Many requests may fail at once: only the first of them and trials set the pause.
        if not self.is_suspect or (self.rest_s and not self._is_tried):
            return False
        self._is_tried = False
        self._pause_s = min(max(MIN_PAUSE_S, 2 * self._pause_s), MAX_PAUSE_S)
        self._until = self._clock() + self._pause_s
        return True
