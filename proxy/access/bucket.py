"""So much per minute, refilled evenly; what was taken beyond it is a debt to wait off."""

import math
import time
from collections.abc import Callable
from typing import Final

MINUTE_S: Final = 60.0


class Bucket:
    """Holds up to one minute's amount.

    The size of a request is not known when it begins, so the level may fall below zero: nothing
    begins until it is above again, and on average the limit holds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = per_minute
        self._level = per_minute
        self._at = clock()

    @property
    def limit(self) -> float:
        """Per minute, and at once."""
        return self._limit

    @limit.setter
    def limit(self, per_minute: float) -> None:
        self._level = min(self.level, per_minute)
        self._limit = per_minute

    @property
    def level(self) -> float:
        """The amount left now; negative after more was taken than was left."""
        now = self._clock()
        self._level = min(self._limit, self._level + (now - self._at) * self._limit / MINUTE_S)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Takes `amount`, or with a negative one gives it back."""
        self._level = min(self._limit, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Until `amount` is left; 0: now."""
        return max(0.0, (amount - self.level) * MINUTE_S / self._limit)

    def headers(self, kind: str) -> dict[str, str]:
        """In OpenAI's words; `reset` says when the whole amount will be left."""
        left = max(0, math.floor(self.level))
        return {
            f"x-ratelimit-limit-{kind}": f"{self._limit:.0f}",
            f"x-ratelimit-remaining-{kind}": f"{left}",
            f"x-ratelimit-reset-{kind}": duration(self.seconds_until(self._limit)),
        }


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < MINUTE_S - 0.5:  # else it would be rounded up to 60s
        return f"{seconds:.3g}s"
    return "{:.0f}m{:.0f}s".format(*divmod(math.ceil(seconds), MINUTE_S))
