"""The disk tier's file system on its bad days: the product's own calls, of which some go wrong."""

import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import cast

from connector.offload.tiers.tier_file import Files

SLOW_S = 0.05
HANG_S = 60.0
READ_FAULTS = ("slow", "hanging", "short", "flipped", "EIO on read", "deleted")
"""A read that takes longer, that waits until it is let go, that ends a byte early, that differs in
one bit, that fails, and one of a file that was deleted after it was looked up."""
ERRNO_OF_WRITE = {"ENOSPC": errno.ENOSPC, "EIO on write": errno.EIO, "read-only": errno.EROFS}
KILLED = "kill -9"
WRITE_FAULTS = (*ERRNO_OF_WRITE, KILLED)
"""Writes that fail, or end the process, when half of the file is there."""


class FaultyFiles(Files):
    """Of the calls that `fault` names every `period`-th goes wrong, while `is_bad`.

    `num_faults`: calls that went wrong. `go_on` lets hanging reads go on.
    """

    def __init__(self, folder: Path, fault: str, period: int = 1, *, is_bad: bool = False) -> None:
        super().__init__(folder)
        self.fault = fault
        self.is_bad = is_bad
        self.num_faults = 0
        self.go_on = Event()
        self._period = period
        self._num_calls = 0

    def read(self, name: str, offset: int, target: memoryview) -> int:
        """Fails as `fault` says."""
        fault = self._next_of(READ_FAULTS)
        if fault == "EIO on read":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "slow":
            time.sleep(SLOW_S)
        elif fault == "hanging":
            self.go_on.wait(HANG_S)
        elif fault == "deleted":
            self.remove(name)
        num_read = super().read(name, offset, target[:-1] if fault == "short" else target)
        if fault == "flipped":
            target[self.num_faults * 4099 % num_read] ^= 1 << self.num_faults % 8
        return num_read

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """The product writes, and meets the fault between two of its own writes."""
        fault = self._next_of(WRITE_FAULTS)
        broken = cast(Sequence[memoryview], self._broken(parts)) if fault else parts
        super().write(name, broken)

    def touch(self, name: str) -> None:
        """Where nothing can be written, times of use cannot be either."""
        self._refuse_if_read_only()
        super().touch(name)

    def remove(self, name: str) -> None:
        """Where nothing can be written, nothing can be removed."""
        self._refuse_if_read_only()
        super().remove(name)

    def _next_of(self, faults: Sequence[str]) -> str | None:
        if self.fault not in faults or not self.is_bad:
            return None
        self._num_calls += 1
        if self._num_calls % self._period:
            return None
        self.num_faults += 1
        return self.fault

    def _broken(self, parts: Sequence[memoryview]) -> Iterator[memoryview]:
        yield from parts[:-1]
        yield parts[-1][: len(parts[-1]) // 2]
        if self.fault == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        number = ERRNO_OF_WRITE[self.fault]
        raise OSError(number, os.strerror(number))

    def _refuse_if_read_only(self) -> None:
        if self.fault == "read-only" and self.is_bad:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
