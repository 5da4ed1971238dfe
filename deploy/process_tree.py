"""Processes below this one, told apart by start time as well as pid. Knows Linux' /proc, no Ray."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05


@dataclass(slots=True, frozen=True)
class ProcessId:
    """One life of one process; a later process with the same pid is another one.

    `started` is field 22 of /proc/PID/stat: clock ticks since boot.
    """

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state not in "ZX"


@dataclass(slots=True, frozen=True)
class _Stat:
    state: str
    parent: int
    started: int


def process_id(pid: int) -> ProcessId | None:
    """Who has this pid now; None when nobody has."""
    stat = _stat(pid)
    return None if stat is None else ProcessId(pid, stat.started)


def descendants(pid: int) -> set[ProcessId]:
    """Children of `pid`, their children, and so on; without zombies."""
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _stat(int(name))) and stat.state not in "ZX":
            children[stat.parent].append(ProcessId(int(name), stat.started))
    found: set[ProcessId] = set()
    new = children[pid]
    while new:
        found.update(new)
        new = [child for process in new for child in children[process.pid]]
    return found


def wait_gone(processes: Iterable[ProcessId], seconds: float) -> set[ProcessId]:
    """Who still runs after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while left := {process for process in processes if process.is_alive}:
        if time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)
    return set()


def end_descendants(pid: int, seconds: float) -> None:
    """Returns when no descendant runs: after `seconds`, whoever still does is killed.

    Looks again and again, for a process that is about to end may still start others.
    """
    deadline = time.monotonic() + seconds
    known: set[ProcessId] = set()
    while left := {each for each in known | descendants(pid) if each.is_alive}:
        known |= left
        if time.monotonic() >= deadline:
            _kill(left)
        time.sleep(POLL_S)


def _kill(processes: Iterable[ProcessId]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks
    return _Stat(fields[0], int(fields[1]), int(fields[19]))
