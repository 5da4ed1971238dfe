"""vLLM's own servers as workers on this machine: started, killed and ended with a block.

Knows no engine and imports no vLLM: `program` is the `vllm` of whatever environment has it. Each
worker has one thread to compute, a port, a NIXL side channel and, with caching, KV events.
"""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.processes import ctrl_c_later, end_with_parent

START_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.5
TELL_S = 15.0
HTTP_S = 10.0
TAIL = 2000
LOOPBACK = "127.0.0.1"
NAME = "bench"
MAX_MODEL_LEN = 4096
# Tokens of a block of an attention-only model in vLLM's CPU build; ids of the tokenizer.
BLOCK, VOCABULARY = 128, 832
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
# A star and port 0 are a free port of VLLM_HOST_IP; a star and a port would be all interfaces, and
# without a star the publisher would connect to somebody who listens.
EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "topic": "kv-events",
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
}
OPTIONS = (
    *("--served-model-name", NAME, "--host", LOOPBACK),
    *("--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"),
    *("--gpu-memory-utilization", "0.1", "--enable-prompt-tokens-details"),
)
ENVIRONMENT = {
    # The engine then computes in its own process. Else it and its worker wait for each other by
    # yielding without a pause, and on two cores the whole machine stood still for up to 38 s.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
}
# Of the worker that starts, and how many seconds it has taken so far.
Tell = Callable[[str, float], None]


class VllmError(Exception):
    """A worker of vLLM does not start, does not answer, or does not end."""


@dataclass(slots=True)
class Worker:
    """One `vllm serve`. `name`: P0, D1."""

    name: str
    url: str
    log: Path
    command: tuple[str, ...]
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _seen: list[psutil.Process] = field(default_factory=list, repr=False)

    @property
    def pid(self) -> int:
        """Of the server, whose child the engine is. Raises VllmError if it was never started."""
        if self._process is None:
            raise VllmError(f"{self.name} was not started")
        return self._process.pid

    def launch(self) -> None:
        """Starts it, at the same ports as before; `wait` says when it serves."""
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                self.command,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )

    def wait(self, tell: Tell = lambda *_: None) -> float:
        """Seconds until it answers; raises VllmError with the end of its log if it does not."""
        began, told = time.monotonic(), 0.0
        while not self.is_healthy():
            took = time.monotonic() - began
            assert self._process is not None
            if self._process.poll() is not None or took > START_TIMEOUT_S:
                said = self.log.read_text(errors="replace")[-TAIL:]
                raise VllmError(f"{self.name} does not serve after {took:.0f} s:\n{said}")
            if took > told + TELL_S:
                tell(self.name, told := took)
            time.sleep(POLL_S)
        return time.monotonic() - began

    def is_healthy(self) -> bool:
        """Whether its engine lives, by its own word."""
        try:
            with urlopen(f"{self.url}/health", timeout=HTTP_S) as reply:
                return bool(reply.status == 200)
        except (OSError, HTTPException):
            return False

    def samples(self) -> dict[str, float]:
        """Its metrics now, those of equal name and other labels added up."""
        with urlopen(f"{self.url}/metrics", timeout=HTTP_S) as reply:
            text = reply.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def usage(self) -> float:
        """The part of its KV cache that requests hold, 0 to 1."""
        return self.samples()["vllm:kv_cache_usage_perc"]

    def event_source(self) -> dict[str, Any]:
        """Where it publishes KV events: `endpoint`, `replay_endpoint`; empty without caching.

        Others after each start.
        """
        with urlopen(f"{self.url}/kv_event_sources", timeout=HTTP_S) as reply:
            found: dict[str, dict[str, Any]] = json.load(reply)
        return found.get("0", {})

    def rss(self) -> int:
        """Bytes of memory of its processes, pages that they share counted in each."""
        return sum(one.memory_info().rss for one in self._alive())

    def kill(self) -> None:
        """SIGKILL to the server and its engine at once, as a machine goes that is lost."""
        alive = self._alive()
        for one in alive:
            _send(one, signal.SIGKILL)
        self._reap(alive)

    def ask_to_end(self) -> None:
        """SIGTERM to the server, which ends its engine."""
        self._seen = self._alive()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Waits for what `ask_to_end` began, and kills whatever is left."""
        alive = [*self._seen, *self._alive()]
        psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
        for one in alive:
            _send(one, signal.SIGKILL)
        self._reap(alive)

    def _alive(self) -> list[psutil.Process]:
        """The server and all below it, and what it left behind of them."""
        if self._process is None:
            return []
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _reap(self, killed: Sequence[psutil.Process]) -> None:
        _, left = psutil.wait_procs(killed, timeout=STOP_TIMEOUT_S)
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_S)
        if left:
            raise VllmError(f"{self.name} left {[one.pid for one in left]} alive")


@dataclass(slots=True, frozen=True)
class Setup:
    """`program`: `vllm` of its own environment; `model`: a checkpoint with a tokenizer."""

    program: Path
    model: Path
    logs: Path


@dataclass(slots=True, frozen=True)
class Workers:
    """All workers that serve one model."""

    prefill: tuple[Worker, ...]
    decode: tuple[Worker, ...]

    @property
    def all(self) -> tuple[Worker, ...]:
        return (*self.prefill, *self.decode)


@contextmanager
def workers(
    setup: Setup,
    *,
    prefill: int = 1,
    decode: int = 1,
    caching: bool = False,
    flags: Sequence[str] = (),
    tell: Tell = lambda *_: None,
) -> Iterator[Workers]:
    """Starts them; all serve, and end with the block.

    `caching`: prefix caching and KV events; a hybrid crashes with it in vLLM's CPU build 0.32.
    `flags`: more of `vllm serve`, for all of them. Raises VllmError.
    """
    names = [*(f"P{one}" for one in range(prefill)), *(f"D{one}" for one in range(decode))]
    made = [_worker(name, setup, caching=caching, flags=flags) for name in names]
    with ExitStack() as stack:
        stack.callback(_end, made)
        with ctrl_c_later():
            for one in made:
                one.launch()
        for one in made:
            one.wait(tell)
        yield Workers(tuple(made[:prefill]), tuple(made[prefill:]))


def _end(made: Sequence[Worker]) -> None:
    with ctrl_c_later():
        for one in made:
            one.ask_to_end()
        for one in made:
            one.end()


def _worker(name: str, setup: Setup, *, caching: bool, flags: Sequence[str]) -> Worker:
    http, side = free_ports(2)
    environment = {**ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
    # `env` becomes the server: its process id stays.
    words = ["env", *(f"{key}={value}" for key, value in environment.items())]
    words += [str(setup.program), "serve", str(setup.model), "--port", str(http), *OPTIONS, *flags]
    words += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    words.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
    if caching:
        words += ["--kv-events-config", json.dumps(EVENTS)]
    return Worker(
        name=name,
        url=f"http://{LOOPBACK}:{http}",
        log=setup.logs / f"{name}.log",
        command=tuple(words),
    )


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
