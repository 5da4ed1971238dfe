"""Standard error that never fails and never blocks: what cannot be written is dropped and counted.

A full disk, a reader that left or one that reads no more is no reason to fail a request.
"""

import atexit
import io
import os
import select
import stat
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Final, TextIO

MAX_WAITING_BYTES: Final = 4 << 20
"""Of lines that wait for a reader; more are dropped."""
FLUSH_S: Final = 2.0
"""For the lines that wait when the process ends."""


class LogLosses:
    """`num_dropped`: lines that this process could not write."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._lock = threading.RLock()  # a signal handler may log inside

    def add(self, data: bytes) -> None:
        """Counts the lines that end in `data`."""
        with self._lock:
            self.num_dropped += data.count(b"\n")


LOSSES: Final = LogLosses()
"""Of the one standard error of this process."""


class LogWriter(io.TextIOBase):
    """A text stream in front of `stream`, safe in any thread. No method raises OSError or waits.

    A file is written at once. What a pipe, a socket or a terminal gets goes through a bounded queue
    and a thread, as its reader may stop to read; lines keep their order. `stream` is None where the
    process was started without one. Each write is tried, also after one that failed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._descriptor: int | None = None
        with suppress(OSError, ValueError):  # no file, or a closed one
            self._descriptor = None if stream is None else stream.fileno()
        self._is_terminal = self._descriptor is not None and os.isatty(self._descriptor)
        self._is_cut = False  # the last write stopped inside its text
        self._waiting: deque[bytes] = deque()
        self._num_waiting = 0  # bytes, with those that are being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if self._descriptor is not None and _has_a_reader(self._descriptor):
            self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
            self._thread.start()
            # Where a process ends: after its last line, also that of a traceback.
            atexit.register(self.drain)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        if self._descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def isatty(self) -> bool:
        return self._is_terminal

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._thread is None:
                self._write_or_drop(text, data)
            elif self._num_waiting + len(data) > MAX_WAITING_BYTES:
                LOSSES.add(data)
            else:
                self._waiting.append(data)
                self._num_waiting += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Does nothing: files have all at once, and nobody waits for a reader."""

    def drain(self, seconds: float = FLUSH_S) -> bool:
        """Waits until all lines are written or dropped; false when some are not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_waiting, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            # Without the lock: this may take until the reader reads.
            self._write_or_drop("", data)
            with self._changed:
                self._num_waiting -= len(data)
                self._changed.notify_all()

    def _write_or_drop(self, text: str, data: bytes) -> None:
        """In one thread at a time."""
        try:
            if self._descriptor is not None:
                self._write_all(self._descriptor, data)
            elif self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
            else:
                LOSSES.add(data)
        except (OSError, ValueError):  # ValueError: the stream is closed
            LOSSES.add(data)

    def _write_all(self, descriptor: int, data: bytes) -> None:
        # What a disk took of a line before it was full stays; the next line is one of its own.
        left = memoryview(b"\n" + data if self._is_cut and data != b"\n" else data)
        while left:
            try:
                size = os.write(descriptor, left)
            except BlockingIOError:  # somebody made it non-blocking, as event loops do
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()
                continue
            self._is_cut = size < len(left)
            left = left[size:]


def take_standard_error() -> None:
    """Puts a LogWriter in the place of `sys.stderr`, once, for logs, warnings and tracebacks."""
    if not isinstance(sys.stderr, LogWriter):
        sys.stderr = LogWriter(sys.stderr)


def fill_standard_descriptors() -> None:
    """Opens /dev/null as 0, 1 and 2 where a process was started without them.

    Else the next file or socket gets that number, and what a library says goes into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened <= number
            os.set_inheritable(opened, True)


def _has_a_reader(descriptor: int) -> bool:
    """Whether a write may wait for another process or for a human."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
