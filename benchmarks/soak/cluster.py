"""Two prefill nodes, two decode nodes and a proxy as processes that may be killed and come back."""

import math
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.processes import Server, ctrl_c_later, launch

STOP_S = 60.0
ARENA_BYTES = 96 << 20
MAX_MODEL_LEN = 4096
KILLS = ("kill",)
FAULTS = (*KILLS, *KILLS, "stop", "stop", "term")
MAX_FROZEN_S = 40.0
MIN_FROZEN_S = 3.0


@dataclass(slots=True)
class Member:
    """One server and its lives, one after the other, always at the same `url`.

    Nothing here waits: what was begun is noticed by `mend`, which is called again and again.
    `ending`: how this life is meant to end, until it has.
    """

    name: str
    command: tuple[str, ...]
    logs: Path
    url: str = ""
    lives: int = 0
    server: Server | None = None
    ending: str = ""
    must_end_by: float = math.inf
    frozen_until: float = 0.0
    killed_at: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def process(self) -> psutil.Process:
        """The process of the present life."""
        return psutil.Process(self._popen.pid)

    @property
    def is_up(self) -> bool:
        """Whether it serves and nothing is done to it at present."""
        assert self.server is not None
        is_free = not self.ending and not self.frozen_until and self._popen.poll() is None
        return is_free and self.server.serves

    def start(self) -> None:
        """Begins a life; returns before it serves."""
        self.lives += 1
        self.ending, self.must_end_by, self.frozen_until = "", math.inf, 0.0
        self.server = launch(self.command, self.logs / f"{self.name}-{self.lives}.log")

    def wait_until_serving(self) -> None:
        """Returns when the present life answers; RuntimeError with its log when it does not."""
        assert self.server is not None
        self.url = self.server.url()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children."""
        with suppress(psutil.NoSuchProcess):
            for process in (*self.process.children(), self.process):
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; `mend` begins the next life."""
        self.ending = "killed"
        self.killed_at.append(time.monotonic())
        self.signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: the process must end by itself with status 0."""
        self.ending, self.must_end_by = "terminated", time.monotonic() + STOP_S
        self._popen.terminate()

    def freeze(self, seconds: float) -> None:
        """SIGSTOP until `seconds` have passed."""
        self.frozen_until = time.monotonic() + seconds
        self.ends["frozen"] += 1
        self.signal(signal.SIGSTOP)

    def mend(self, *, at_once: bool = False) -> None:
        """Thaws what was frozen long enough; begins a new life after one that has ended."""
        status = self._popen.poll()
        if status is not None:
            self.ends[self._judged(status)] += 1
            self.start()
        elif self.frozen_until and (at_once or time.monotonic() >= self.frozen_until):
            self.frozen_until = 0.0
            self.signal(signal.SIGCONT)
        elif time.monotonic() >= self.must_end_by:
            self.ending = "SIGTERM was not heard"
            self.signal(signal.SIGKILL)

    def stop(self) -> None:
        """The end of the soak."""
        self.signal(signal.SIGCONT)
        if self.server is not None:
            self.server.stop()

    @property
    def _popen(self) -> subprocess.Popen[bytes]:
        assert self.server is not None
        return self.server.process

    def _judged(self, status: int) -> str:
        if not self.ending:
            return f"died by itself with status {status}"
        if self.ending == "terminated" and status != 0:
            return f"SIGTERM gave status {status}"
        return self.ending


@dataclass(slots=True)
class Cluster:
    """All members; nodes before the proxy."""

    nodes: list[Member]
    proxy: Member

    @property
    def members(self) -> list[Member]:
        """Nodes and proxy."""
        return [*self.nodes, self.proxy]

    def disturb(self, draw: random.Random, faults: Sequence[str]) -> None:
        """One of `faults` at a node that is up, if there is one."""
        up = [node for node in self.nodes if node.is_up]
        fault = draw.choice(faults)
        if not up:
            return
        node = draw.choice(up)
        if fault == "kill":
            node.kill()
        elif fault == "term":
            node.terminate()
        else:
            node.freeze(min(MAX_FROZEN_S, MIN_FROZEN_S + draw.expovariate(0.1)))

    def mend(self, *, at_once: bool = False) -> None:
        """Ends every fault that has lasted long enough, or all of them."""
        for member in self.members:
            member.mend(at_once=at_once)


@contextmanager
def cluster(model: str, logs: Path) -> Iterator[Cluster]:
    """Starts five processes on ports of their own and stops whatever life they are in."""
    started: list[Member] = []
    try:
        for number, kind in enumerate(("prefill", "prefill", "decode", "decode")):
            command = (*node_command(kind, model), "--port", "0")
            started.append(Member(f"{kind}-{number}", command, logs))
            started[-1].start()
        for node in started:
            node.wait_until_serving()
            # The next life has the port of this one: the proxy knows the node by it.
            node.command = (*node.command, "--port", node.url.rpartition(":")[2])
        nodes = list(started)
        roles = [(f"--{node.name.partition('-')[0]}", node.url) for node in nodes]
        flags = [word for role in roles for word in role]
        started.append(Member("proxy", ("proxy", *flags, "--port", "0"), logs))
        started[-1].start()
        started[-1].wait_until_serving()
        yield Cluster(nodes, started[-1])
    finally:
        with ctrl_c_later():
            for member in reversed(started):
                member.stop()


def node_command(kind: str, model: str) -> tuple[str, ...]:
    """How a node of the soak is started; the reference is started like any other."""
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(ARENA_BYTES))
    return (f"{kind}_node", model, "--served-model-name", "soak", "--dtype", "float32", *limits)
