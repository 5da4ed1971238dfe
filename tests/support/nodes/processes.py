"""Servers as real processes: `python -m prefill_node MODEL ...`, forked to spare the imports.

In a container's stead a command starts them. What they say goes to a file; what they hold is read
from outside.
"""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nodes.forks import Fork
from tests.support.nodes.leaks import Holdings, children_of, excess, held_by, segments_of

START_S = 90.0
STOP_S = 40.0
SETTLE_S = 20.0
POLL_S = 0.02
LIBRARY_NEWS = (
    r"[IW]\d{4} .*\.cc:\d+\]"  # gRPC
    r"|[EW]\d{4} .*(nixl_agent|ucx_\w+)\.cpp:\d+\]"  # NIXL, of peers that are gone
)
API_KEY = "key of the clients"
CLUSTER_TOKEN = "secret of the nodes"
SECRETS = ("--api-key", API_KEY, "--cluster-token", CLUSTER_TOKEN)
NODE_FLAGS = (
    *("--port", "0", "--served-model-name", "tiny"),
    *("--kv-cache-memory-bytes", str(16 << 20), "--max-num-batched-tokens", "64"),
    "--enable-prompt-tokens-details",
    *("--drain-timeout", "2"),  # some tests leave leases behind that nobody will release
    "--no-enable-prefix-caching",  # equal requests must cost, move and round the same each time
)
AT_REST = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "tandem:mamba_states",
    "tandem:held_requests",
    "tandem:grammar_sequences",
)


def free_port() -> int:
    """A port that nobody listens on now, nor is given by chance until a server takes it.

    Below those that the kernel gives for port 0 and to clients, above those of Ray's workers.
    """
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(slots=True)
class ServerProcess:
    """One process from its start to its end; whoever launches it must `stop` or `kill` it."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | Fork
    url: str = ""
    start_value: Holdings | None = None

    @classmethod
    def launch(
        cls,
        log: Path,
        module: str,
        *arguments: str,
        inside: Sequence[str] | Callable[[], None] = (),
        **environment: str,
    ) -> "ServerProcess":
        """Returns at once, so that several start together.

        `inside`: a command that runs it, or what it calls before all else, as a fork.
        """
        every = {**os.environ, **environment}
        log.write_bytes(b"")
        if not inside:
            return cls(module, log, Fork(module, arguments, log, every))
        if callable(inside):
            return cls(module, log, Fork(module, arguments, log, every, settle=inside))
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*inside, sys.executable, "-m", module, *arguments],
                stderr=file,
                stdout=subprocess.DEVNULL,
                env=every,
            )
        return cls(module, log, process)

    @property
    def port(self) -> int:
        """Its HTTP port."""
        return int(self.url.rpartition(":")[2])

    @property
    def said(self) -> str:
        """All of its log so far."""
        return self.log.read_text(errors="replace")

    def wait_until_serving(self) -> "ServerProcess":
        """Fails with the log when the process ends first."""
        deadline = time.monotonic() + START_S
        while not (found := re.search(r'"url": "(http://[^"]+)"', self.said)):
            assert self.process.poll() is None, f"{self.name} ended:\n{self.said}"
            assert time.monotonic() < deadline, f"{self.name} does not serve:\n{self.said}"
            time.sleep(POLL_S)
        self.url = found[1]
        return self

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this process and its children, as to everything on a host."""
        signal_all(self.process.pid, number)

    def stop(self) -> None:
        """SIGTERM; it must end by itself, with status 0, without a traceback and leave nothing."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert status == 0, self.said
        assert_clean_log(self)
        assert not segments_of(self.process.pid)

    def kill(self) -> None:
        """SIGKILL, and the end of the process."""
        self.signal(signal.SIGKILL)
        self.process.wait(STOP_S)
        assert not segments_of(self.process.pid)

    def metrics(self) -> dict[str, float]:
        """Samples by name; those of one name are added up."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=STOP_S) as reply:
            text = reply.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def wait_for(self, name: str, value: float) -> None:
        """Returns when the metric `name` has `value`."""
        deadline = time.monotonic() + SETTLE_S
        while (found := self.metrics()[name]) != value:
            assert time.monotonic() < deadline, f"{self.name}: {name} is {found}, not {value}"
            time.sleep(POLL_S)

    def wait_for_at_least(self, name: str, value: float) -> None:
        """Returns when the metric `name` has `value` or more; absent, it is 0."""
        deadline = time.monotonic() + SETTLE_S
        while (found := self.metrics().get(name, 0.0)) < value:
            assert time.monotonic() < deadline, f"{self.name}: {name} is {found}, below {value}"
            time.sleep(POLL_S)

    def remember_start_value(self) -> None:
        """Records what the process holds after an answer, which is all that it may hold at rest."""
        self.metrics()  # the first HTTP connection makes libuv keep one spare descriptor
        self.start_value = held_by(self.process.pid)

    def assert_at_rest(self) -> None:
        """No request, block, state or lease, and nothing beyond the start value, if it is known."""
        deadline = time.monotonic() + SETTLE_S
        while found := self._not_at_rest():
            assert time.monotonic() < deadline, f"{self.name} still holds {found}"
            time.sleep(POLL_S)
        assert_clean_log(self)

    def _not_at_rest(self) -> Holdings:
        assert self.process.poll() is None, self.said
        values = self.metrics()
        held = held_by(self.process.pid)
        found = excess(held if self.start_value is None else self.start_value, held)
        found.update({name: 1 for name in AT_REST if values.get(name)})
        return found


def signal_all(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process and its children; those that are gone are left out.

    After SIGSTOP all of their threads stand still; the kernel lets some go on for a moment.
    """
    signalled = (*children_of(pid), pid)
    for each in signalled:
        with suppress(ProcessLookupError):
            os.kill(each, number)
    deadline = time.monotonic() + SETTLE_S
    while number == signal.SIGSTOP and any(map(_goes_on, signalled)):
        assert time.monotonic() < deadline, f"{signalled} do not stop"
        time.sleep(POLL_S / 10)


def _goes_on(pid: int) -> bool:
    """Whether a thread of a process is neither stopped nor at its end."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            # The name in brackets may hold anything; the state comes after it.
            if (task / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return True
    return False


def assert_clean_log(server: ServerProcess) -> None:
    """Nothing died unseen: no traceback and no error, only structured lines and library news."""
    for line in server.said.splitlines():
        if not re.match(LIBRARY_NEWS, line):
            assert line.startswith("{"), server.said
            assert json.loads(line)["level"] in ("info", "warning"), line


@dataclass(slots=True)
class ServedCluster:
    """A prefill node, a decode node and a proxy, all with one API key and one cluster token."""

    p: ServerProcess
    d: ServerProcess
    proxy: ServerProcess
    model: Path

    @classmethod
    def start(cls, model: Path, logs: Path, **environment: str) -> "ServedCluster":
        """The nodes start together, the proxy when their addresses are known."""
        flags = [*NODE_FLAGS, *SECRETS]
        nodes = [
            ServerProcess.launch(logs / kind, kind, str(model), *flags, **environment)
            for kind in ("prefill_node", "decode_node")
        ]
        try:
            p, d = [node.wait_until_serving() for node in nodes]
            nodes.append(launch_proxy(logs / "proxy", p, d, *SECRETS))
            proxy = nodes[-1].wait_until_serving()
            proxy.wait_for("tandem_proxy_available_nodes", 2)
            return cls(p, d, proxy, model)
        except BaseException:
            kill_all(nodes)
            raise

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        """All three."""
        return self.p, self.d, self.proxy

    def warm_up(self) -> None:
        """One request through all three opens the connections that stay."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{self.proxy.url}/v1/completions", body, headers)
        urllib.request.urlopen(request, timeout=STOP_S).close()
        for server in self.servers:
            server.remember_start_value()

    def stop(self) -> None:
        """Each must end well by itself; whatever does not is killed."""
        try:
            for server in (self.proxy, self.d, self.p):
                server.stop()
        finally:
            kill_all(self.servers)


def launch_proxy(log: Path, p: ServerProcess, d: ServerProcess, *flags: str) -> ServerProcess:
    """A proxy in front of two nodes."""
    nodes = ["--prefill", p.url, "--decode", d.url]
    own = ("--port", "0", "--enable-prompt-tokens-details")
    return ServerProcess.launch(log, "proxy", *nodes, *own, *flags)


def transport_flag(transport: str, **extra: object) -> tuple[str, str]:
    """A node's flag for its transport and anything else of `kv_connector_extra_config`."""
    config = {"kv_connector_extra_config": {"transport": transport, **extra}}
    return "--kv-transfer-config", json.dumps(config)


@dataclass(slots=True)
class Launcher:
    """Starts real nodes of one model that end with the test at the latest."""

    model: Path
    logs: Path
    started: list[ServerProcess] = field(default_factory=list)

    def launch(self, kind: str, *flags: str, **environment: str) -> ServerProcess:
        """A node that does not serve yet."""
        log = self.logs / f"{kind}-{len(self.started)}"
        arguments = [str(self.model), *NODE_FLAGS, *flags]
        return self._keep(ServerProcess.launch(log, kind, *arguments, **environment))

    def node(self, kind: str, *flags: str, **environment: str) -> ServerProcess:
        """A node that serves."""
        return self.launch(kind, *flags, **environment).wait_until_serving()

    def proxy(self, p: ServerProcess, d: ServerProcess, *flags: str) -> ServerProcess:
        """A proxy that serves."""
        log = self.logs / f"proxy-{len(self.started)}"
        return self._keep(launch_proxy(log, p, d, *flags)).wait_until_serving()

    def _keep(self, server: ServerProcess) -> ServerProcess:
        self.started.append(server)
        return server


def kill_all(servers: Iterable[ServerProcess]) -> None:
    """Ends those that still run, without a question."""
    for server in servers:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="session")
def served_by_processes(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedCluster]:
    """One cluster for all tests that only ask; its start value is that after one good request."""
    cluster = ServedCluster.start(checkpoints["qwen3_5"], tmp_path_factory.mktemp("served"))
    try:
        cluster.warm_up()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def served(served_by_processes: ServedCluster) -> Iterator[ServedCluster]:
    """A cluster of real processes that must be at rest again after every test."""
    yield served_by_processes
    for server in served_by_processes.servers:
        server.assert_at_rest()


@pytest.fixture
def real(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[Launcher]:
    """For tests that kill: what they leave alive must end well by itself."""
    launcher = Launcher(checkpoints["qwen3_5"], tmp_path)
    try:
        yield launcher
        for server in reversed(launcher.started):
            if server.process.poll() is None:
                server.stop()
    finally:
        kill_all(launcher.started)
