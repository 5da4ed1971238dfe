"""Reads that progress only while somebody polls them, waits for them or cancels them."""

import time
from abc import abstractmethod
from collections import deque
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic, TypeVar

from connector.transports.base import Transfer
from engine.errors import TransferTimeoutError, TransportError

_DRAIN_S = 1.0  # how long a cancelled read may take to end by itself

_Request = TypeVar("_Request")


class PolledTransfer(Transfer):
    """Waiting as a loop of `_advance` under `_lock` and `_pause` without it.

    `peer` names it in errors, `total` is its length in bytes, of which the first `here` have come.
    """

    def __init__(self, peer: str, total: int, lock: AbstractContextManager[Any]) -> None:
        self.peer = peer
        self.here = 0
        self.is_done = False
        self.failure: str | None = None
        self._lock = lock
        self._end = total + 1  # more bytes than there are: who wants them waits for the end

    @property
    def is_open(self) -> bool:
        return not self.is_done and self.failure is None

    def poll(self) -> bool:
        return self._has(self._end)

    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        wanted = self._end if nbytes is None else nbytes
        if not self._wait_until(time.monotonic() + timeout_s, wanted):
            self.cancel()
            raise TransferTimeoutError(f"read from {self.peer} not done after {timeout_s} s")

    def _wait_until(self, deadline: float, wanted: int) -> bool:
        """True if `wanted` bytes came before `deadline`. Raises TransportError after a failure."""
        started = time.monotonic()
        while not self._has(wanted):
            now = time.monotonic()
            if now >= deadline:
                return False
            self._pause(now - started, deadline - now)
        return True

    def _has(self, wanted: int) -> bool:
        with self._lock:
            if self.is_open:
                self._advance(wanted)
            if self.failure is not None:
                raise TransportError(self.failure)
            return self.is_done or self.here >= wanted

    @abstractmethod
    def _advance(self, wanted: int) -> None:
        """Without blocking, take and ask for bytes up to `wanted`; sets `is_done`, or `failure`."""

    @abstractmethod
    def _pause(self, waited_s: float, left_s: float) -> None:
        """Return when more may have come, after at most `left_s` seconds."""


class DrainedTransfer(PolledTransfer, Generic[_Request]):
    """A read over a library that cannot stop a request that has been posted.

    So `cancel` posts no more and lets what is under way end. If the peer does not answer, only
    closing the whole connection keeps its bytes out of our memory.
    """

    def __init__(self, peer: str, total: int, lock: AbstractContextManager[Any]) -> None:
        super().__init__(peer, total, lock)
        self.waiting: deque[_Request] = deque()

    def cancel(self) -> None:
        with self._lock:
            if not self.is_open:
                return
            self.waiting.clear()
        with suppress(TransportError):  # it may fail while it drains: cancelled is cancelled
            self._wait_until(time.monotonic() + _DRAIN_S, self._end)
        with self._lock:
            if self.is_open:
                self._close_connection(f"a read from {self.peer} was cancelled")
            self.failure = f"the read from {self.peer} was cancelled"

    @abstractmethod
    def _close_connection(self, reason: str) -> None:
        """Fail all reads of the connection; afterwards no byte of them arrives."""
