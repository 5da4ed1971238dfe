"""How far a model is loaded: a bar on a terminal, elsewhere a log line now and then. Torch-free."""

import sys
import threading
import time
from typing import Final, Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

TELL_S: Final = 5.0

log = structlog.get_logger()


class LoadProgress:
    """Counts bytes up to `total`; use as a context manager. `add` may be called in any thread.

    Where standard error is no terminal, it holds the lines of the log and nothing else.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._lock = threading.Lock()
        self._began = self._told = time.monotonic()
        columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._is_on_terminal = sys.stderr.isatty()
        self._bar = Progress(
            *columns,
            console=Console(stderr=True),
            transient=True,
            # Else they would be wrapped while the bar is shown, and the log has its own stream.
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._is_on_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, num_bytes: int) -> None:
        """So many more are read."""
        self._bar.advance(self._task, num_bytes)
        with self._lock:
            self._done += num_bytes
            done, now = self._done, time.monotonic()
            if self._is_on_terminal or now - self._told < TELL_S:
                return
            self._told = now
        rate = round(done / (now - self._began))
        log.info("loading", bytes=done, of=self._total, bytes_per_s=rate)
