"""Servers as a user starts them, `python -m MODULE ...`: started together, ended with the block.

Knows no module by name. Ctrl-C reaches the benchmark only, which then ends its servers; if it is
killed, the kernel tells them to end.
"""

import ctypes
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
URL = re.compile(r'"url": "(http://[^"]+)"')


@dataclass(slots=True, frozen=True)
class Server:
    """One process and the file with what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def serves(self) -> bool:
        """Whether it has said where."""
        return URL.search(self.log.read_text(errors="replace")) is not None

    def url(self) -> str:
        """Where it serves, once it does; raises RuntimeError with its log when it does not."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := URL.search(said := self.log.read_text(errors="replace"))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.process.args!r} does not serve:\n{said}")
            time.sleep(POLL_S)
        return found[1]

    def rss(self) -> int:
        """Bytes of memory that it has now, without the arena, which is shared."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not heard."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(command: tuple[str, ...], log: Path) -> Server:
    """Starts a module with its arguments, in a session of its own; what it says goes to `log`."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stderr=file,
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    return Server(process, log)


@contextmanager
def servers(logs: Path, *commands: tuple[str, ...]) -> Iterator[list[str]]:
    """Starts all `commands` (module and arguments) at once; their URLs, when all of them serve."""
    with processes(logs, *commands) as started:
        yield [server.url() for server in started]


@contextmanager
def processes(logs: Path, *commands: tuple[str, ...]) -> Iterator[list[Server]]:
    """The same as processes; all of them serve."""
    started: list[Server] = []
    try:
        with ctrl_c_later():
            for number, command in enumerate(commands):
                started.append(launch(command, logs / f"{command[0]}-{number}.log"))
        for server in started:
            server.url()
        yield started
    finally:
        with ctrl_c_later():
            for server in started:
                server.process.send_signal(signal.SIGTERM)
            for server in started:
                server.stop()


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """A Ctrl-C inside the block comes after it: what it starts is known, what it ends has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def end_with_parent() -> None:
    """In the child: the kernel sends SIGTERM when the thread that started it is gone."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
