"""The process of a command: the signals that stop it, and the processes below it.

Ctrl-C, SIGTERM and a closed terminal all raise KeyboardInterrupt.
"""

import ctypes
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

POLL_S = 0.05

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36


def stop_on_signals() -> None:
    """From now on they raise KeyboardInterrupt in the main thread."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """For the rest of the process: nothing interrupts the cleaning up."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals wait until the end of the block, and then find `stop_on_signals` in force.

    For the start of a Ray of our own: its core aborts the process when SIGTERM comes meanwhile.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        stop_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def is_alive(process: psutil.Process) -> bool:
    """True while it runs: not a zombie, nor a later process with the same pid."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes this one's child.

    `end_descendants` finds it then. Nobody waits for its end, so call this last.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> set[psutil.Process]:
    """Children of this process, their children, and so on; without zombies."""
    return {each for each in psutil.Process().children(recursive=True) if is_alive(each)}


def wait_gone(processes: Iterable[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Returns those that still run after at most `seconds`; zombies may have any parent."""
    deadline = time.monotonic() + seconds
    while (left := set(filter(is_alive, processes))) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def end_descendants(seconds: float) -> None:
    """Returns when no descendant runs: after `seconds`, those that still do are killed."""
    deadline = time.monotonic() + seconds
    known: set[psutil.Process] = set()
    # Looked for again and again: a process that is about to end may still start others, and those
    # whose parent has ended are descendants no longer.
    while left := {each for each in known | descendants() if is_alive(each)}:
        known |= left
        for process in left if time.monotonic() >= deadline else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
