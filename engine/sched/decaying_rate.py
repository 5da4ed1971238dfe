"""How fast something goes: amount per second, the latest of it counting most."""

import threading
from math import exp
from typing import Final

HORIZON_S: Final = 30.0


class DecayingRate:
    """Amount over time, both fading with the time that is added; from any thread.

    `per_s`: 0 until something is added. What lies `horizon_s` of added seconds back counts 1/e.
    """

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        self.per_s = 0.0
        self._horizon_s = horizon_s
        self._amount = 0.0
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`; ignored where the clock saw no time pass."""
        if seconds <= 0.0:
            return
        with self._lock:
            kept = exp(-seconds / self._horizon_s)
            self._amount = self._amount * kept + amount
            self._seconds = self._seconds * kept + seconds
            self.per_s = self._amount / self._seconds
