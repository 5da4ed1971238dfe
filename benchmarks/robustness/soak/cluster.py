"""Two prefill nodes, two decode nodes and a proxy as processes that may be killed and come back.

All that a cluster may have is there: tiers in host memory and in one folder for all nodes, KV
events, keys of two tenants, of which one shares no cache, and a bound on sequences.
"""

import json
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

from benchmarks.support.processes import Server, ctrl_c_later, launch

STOP_S = 60.0
ARENA_BYTES = 48 << 20
HOST_BYTES = 32 << 20
FOLDER_BYTES = 192 << 20
PLACES = 32
TENANTS = {"soak-key-of-alice": "acme", "soak-key-of-anna": "acme", "soak-key-of-robert": "bolt"}
ISOLATED = "bolt"
OPERATOR_KEY = "soak-key-of-the-operator"
FAMILY_ENDS_S = 5.0
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
    family: list[psutil.Process] = field(default_factory=list)

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
        for process in self._children():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        with suppress(psutil.NoSuchProcess):
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the process alone; its children must end by themselves."""
        self.ending = "killed"
        self.killed_at.append(time.monotonic())
        self.family += self._children()
        self._popen.kill()

    def orphans(self) -> int:
        """Children that still live a while after their parents were killed."""
        _, alive = psutil.wait_procs(self.family, timeout=FAMILY_ENDS_S)
        return len(alive)

    def _children(self) -> list[psutil.Process]:
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

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
    """All members; nodes before the proxy. `folder`: of the tier that all nodes share."""

    nodes: list[Member]
    proxy: Member
    folder: Path

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
    folder = logs / "tier"
    try:
        for number, kind in enumerate(("prefill", "prefill", "decode", "decode")):
            command = (*node_command(kind, model), *_tiers(folder), "--port", "0")
            started.append(Member(f"{kind}-{number}", command, logs))
            started[-1].start()
        for node in started:
            node.wait_until_serving()
            # The next life has the port of this one: the proxy knows the node by it.
            node.command = (*node.command, "--port", node.url.rpartition(":")[2])
        nodes = list(started)
        roles = [(f"--{node.name.partition('-')[0]}", node.url) for node in nodes]
        flags = [word for role in roles for word in role]
        keys = ("--api-keys-file", str(_keys(logs)), "--api-key", OPERATOR_KEY)
        bound = ("--max-concurrent-requests", str(PLACES))
        started.append(Member("proxy", ("proxy", *flags, *keys, *bound, "--port", "0"), logs))
        started[-1].start()
        started[-1].wait_until_serving()
        yield Cluster(nodes, started[-1], folder)
    finally:
        with ctrl_c_later():
            for member in reversed(started):
                member.stop()


def node_command(kind: str, model: str) -> tuple[str, ...]:
    """How a node of the soak is started; the reference is started like any other."""
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(ARENA_BYTES))
    return (f"{kind}_node", model, "--served-model-name", "soak", "--dtype", "float32", *limits)


def _tiers(folder: Path) -> tuple[str, ...]:
    offload = {"host_bytes": HOST_BYTES, "disk_path": str(folder), "disk_bytes": FOLDER_BYTES}
    children = [
        {"kv_connector": "PdConnector"},
        {"kv_connector": "OffloadConnector", "kv_connector_extra_config": offload},
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }
    events = {"enable_kv_cache_events": True}
    return ("--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events))


def _keys(logs: Path) -> Path:
    """The file of keys: JSON is YAML."""
    file = logs / "keys.yaml"
    keys = [
        {
            "name": key.rpartition("-")[2],
            "key": key,
            "tenant": tenant,
            "isolate_cache": tenant == ISOLATED,
        }
        for key, tenant in TENANTS.items()
    ]
    file.touch(mode=0o600)
    file.write_text(json.dumps({"keys": keys}))
    return file
