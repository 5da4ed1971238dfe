"""Hand-overs that keep failing, by peer and cause: one log line per cause, and when to try again.

A D node records failures of its peers, and the proxy what a node refuses.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from engine.types import HandOverProblem
from serving.breaker import Breaker

MAX_FAILURES = 2
"""In a row make a problem, unless the first one says that it will last."""
LOG_AGAIN_S = 60.0
FORGET_S = 300.0
MAX_PEERS = 64
MAX_DETAIL = 500

log = structlog.get_logger()


@dataclass(slots=True)
class _Failures:
    """Failures in a row with one incarnation of a peer, at `address`; times in seconds."""

    address: str
    breaker: Breaker
    since: float
    last: float
    cause: str = ""
    detail: str = ""


@dataclass(slots=True)
class _Line:
    """Time of the last log line of one cause, and the number of failures since then."""

    at: float
    suppressed: int = 0


class HandOverProblems:
    """Thread-safe. A success ends a problem, and so do five minutes without a failure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, _Failures] = {}
        self._lines: dict[tuple[str, str], _Line] = {}

    def failed(
        self, engine_id: str, address: str, cause: str, *, detail: str, lasting: bool = False
    ) -> None:
        """Record a failed hand-over from `engine_id`; `cause` is one of a few, `detail` free."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            # Bounded: whoever makes up peers fills this table, not the memory.
            if engine_id in self._failures or len(self._failures) < MAX_PEERS:
                breaker = Breaker(self._clock, MAX_FAILURES)
                found = self._failures.setdefault(engine_id, _Failures(address, breaker, now, now))
                found.breaker.failed(lasting=lasting)
                found.last, found.cause, found.detail = now, cause, detail[:MAX_DETAIL]
        self.note(cause, detail, engine_id=engine_id, address=address)

    def note(self, cause: str, detail: str, *, engine_id: str = "", address: str = "") -> None:
        """Log a failure, which may be no peer's, at once and then at most once a minute."""
        now = self._clock()
        with self._lock:
            line = self._lines.get((engine_id, cause))
            if line is not None and now < line.at + LOG_AGAIN_S:
                line.suppressed += 1
                return
            more = 0 if line is None else line.suppressed
            if len(self._lines) < 2 * MAX_PEERS or line is not None:
                self._lines[engine_id, cause] = _Line(now)
        log.warning(
            "a hand-over failed; the prompt is computed again",
            cause=cause,
            peer=engine_id,
            address=address,
            error=detail,
            more_since_last_line=more,
        )

    def worked(self, engine_id: str, address: str) -> None:
        """End the problem of this peer, and of earlier incarnations at its address."""
        # Without the lock, since every good hand-over comes here; a race costs one late removal.
        if not self._failures:
            return
        with self._lock:
            for key in [key for key, it in self._failures.items() if it.address == address]:
                del self._failures[key]
            self._failures.pop(engine_id, None)

    def present(self) -> tuple[HandOverProblem, ...]:
        now = self._clock()
        with self._lock:
            self._forget(now)
            return tuple(
                HandOverProblem(
                    engine_id=engine_id,
                    address=found.address,
                    cause=found.cause,
                    detail=found.detail,
                    count=found.breaker.num_failures,
                    since_s=now - found.since,
                    retry_in_s=found.breaker.rest_s,
                )
                for engine_id, found in self._failures.items()
                if found.breaker.is_suspect
            )

    def _forget(self, now: float) -> None:
        for key in [key for key, it in self._failures.items() if it.last + FORGET_S < now]:
            del self._failures[key]
        for pair in [pair for pair, it in self._lines.items() if it.at + FORGET_S < now]:
            del self._lines[pair]
