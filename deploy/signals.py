"""One way to stop a command: Ctrl-C, SIGTERM and a closed terminal all raise KeyboardInterrupt."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

    For `ray.init`: it sets handlers of its own, loses exceptions raised between its forks, and
    aborts the process when SIGTERM comes while its core starts. What it starts inherits the block:
    a signal to the whole process group, as service managers send it, must not end Ray before the
    cluster on it has been stopped, for nothing could be asked of it any more.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        stop_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
