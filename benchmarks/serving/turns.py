"""Servers that stand still while others are asked, where all of them share this machine's cores.

vLLM's CPU workers poll without a pause: two of them take two cores though nobody asks them.
"""

import signal
from collections.abc import Iterable

import psutil

from engine.errors import ConfigError


class Turns:
    """The processes of some targets, by name: at most one target's run at a time.

    A stopped process keeps its sockets: who connects meanwhile waits. `close` lets all go on.
    """

    def __init__(self, given: Iterable[str], names: Iterable[str]) -> None:
        """`given`: NAME=PID each. Raises ConfigError for a name or process that is not there."""
        known = set(names)
        self._roots: dict[str, psutil.Process] = {}
        for one in given:
            name, _, pid = one.rpartition("=")
            if name not in known or not pid.isdecimal():
                raise ConfigError(f"--pid {one}: write NAME=PID with a name of --target")
            try:
                self._roots[name] = psutil.Process(int(pid))
            except psutil.NoSuchProcess as error:
                raise ConfigError(f"--pid {one}: there is no such process") from error

    def take(self, name: str) -> None:
        """Stops the processes of all others, then lets those of `name` go on."""
        for other in self._roots.keys() - {name}:
            self._send(other, signal.SIGSTOP)
        if name in self._roots:
            self._send(name, signal.SIGCONT)

    def close(self) -> None:
        for name in self._roots:
            self._send(name, signal.SIGCONT)

    def _send(self, name: str, number: signal.Signals) -> None:
        waiting = [self._roots[name]]
        while waiting:
            process = waiting.pop()
            try:
                process.send_signal(number)
                waiting += process.children()  # asked after it: who has stopped starts no more
            except psutil.NoSuchProcess:  # it ended meanwhile: its server will not answer
                continue
