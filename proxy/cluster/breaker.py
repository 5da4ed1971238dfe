"""A node whose requests fail in a row rests for a while; then one request tries it again.

    closed --MAX_FAILURES in a row--> rests --pause--> one trial --it works--> closed
                                        ^--- it fails, twice the pause ---'

Such a node may well describe itself as ready: only its requests show that something hangs.
"""

import time
from collections.abc import Callable
from typing import Final

MAX_FAILURES: Final = 3
MIN_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0


class Breaker:
    """The failures of one node. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.worked()

    @property
    def rests(self) -> bool:
        """True while the node should get no request."""
        return self._num_failures >= MAX_FAILURES and self._clock() < self._until

    def worked(self) -> None:
        """A request ended well, or another process has taken the node's place."""
        self._num_failures = 0
        self._pause_s = 0.0
        self._until = 0.0
        self._is_tried = False

    def began(self) -> None:
        """A request begins; while the node is suspect it is the only one, unless it takes long."""
        if self._num_failures >= MAX_FAILURES and not self.rests:
            self._is_tried = True
            self._until = self._clock() + MAX_PAUSE_S

    def unjudged(self) -> None:
        """A request ended by its own fault, or another node's: the next one may be the trial."""
        if self._is_tried:
            self._is_tried = False
            self._until = self._clock()

    def failed(self) -> bool:
        """A request failed, and not by its own fault; true if the node begins to rest."""
        self._num_failures += 1
        # Many requests may fail at once: only the first of them and trials set the pause.
        if self._num_failures < MAX_FAILURES or (self.rests and not self._is_tried):
            return False
        self._is_tried = False
        self._pause_s = min(max(MIN_PAUSE_S, 2 * self._pause_s), MAX_PAUSE_S)
        self._until = self._clock() + self._pause_s
        return True
