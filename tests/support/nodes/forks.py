"""Processes that begin as copies of one that has imported everything, which takes seconds.

Else they are as others: `python -m MODULE ARGUMENTS`, with its environment, its output, its end.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

COMMAND_S = 60.0
PRELOADED = ("serving.cli", "serving.node.server", "connector.registry", "proxy.server")


def forks() -> ForkServerContext:
    """The one server of all forks of this test process; it runs from now on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "tests.support.network.transport_peer", *PRELOADED])
    forkserver.ensure_running()
    return context


class Command(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


class Fork:
    """As much of `subprocess.Popen` as tests need."""

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...],
        log: Path,
        environment: Mapping[str, str],
        *,
        output: Path | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """`log` gets its errors, and `output`, if there is one, what it prints.

        It calls `settle` first, on its only thread.
        """
        paths = log, output or Path(os.devnull)
        self._process: ForkServerProcess = forks().Process(
            target=_run, args=(module, arguments, paths, dict(environment), settle), daemon=False
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status, negative for a signal; None while it runs."""
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its status. Raises subprocess.TimeoutExpired when it runs for longer."""
        if self.returncode is None:
            self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)


def run_command(
    folder: Path,
    module: str,
    *arguments: str,
    settle: Callable[[], None] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Command:
    """`python -m MODULE ARGUMENTS` from its start to its end; it calls `settle` first."""
    output, errors = folder / "stdout", folder / "stderr"
    for path in (output, errors):
        path.write_bytes(b"")
    every = {**os.environ, **environment}
    fork = Fork(module, arguments, errors, every, output=output, settle=settle)
    return Command(fork.wait(COMMAND_S), output.read_text(), errors.read_text())


def _run(
    module: str,
    arguments: tuple[str, ...],
    paths: tuple[Path, Path],
    environment: dict[str, str],
    settle: Callable[[], None] | None,
) -> None:
    for path, stream in zip(paths, (sys.stderr, sys.stdout), strict=True):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    if settle is not None:
        settle()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a fork ends without them
