"""A Ray on hosts of its own: a head and workers in network namespaces that a bridge joins."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.network.netns import End, cable, namespaces, run, skip_if_impossible
from tests.support.network.two_hosts import Host

PORT = 6379
START_S, STOP_S, COMMAND_S = 60.0, 30.0, 60.0
POLL_S = 0.1
PLASMA_BYTES = 80 << 20


@dataclass(slots=True)
class RayHosts:
    """The first host is the head. `logs`: what each host's `ray start` says."""

    hosts: Sequence[Host]
    folder: Path
    environment: dict[str, str]
    logs: dict[str, Path] = field(default_factory=dict)
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        """Where commands run."""
        return self.hosts[0]

    @property
    def address(self) -> str:
        """Where Ray listens."""
        return f"{self.head.address}:{PORT}"

    def deploy(
        self, *arguments: str, seconds: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """`python -m deploy`, run on the head for its Ray."""
        deploy = (sys.executable, "-m", "deploy", *arguments, "--address", self.address)
        return subprocess.run(
            [*self.head.inside, *deploy],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start(self) -> None:
        """Returns when every raylet is up."""
        for host in self.hosts:
            self._start(host)
        deadline = time.monotonic() + START_S
        for name, log in self.logs.items():
            while "Ray runtime started" not in (said := log.read_text()):
                assert self.started[name].poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(POLL_S)

    def _start(self, host: Host) -> None:
        role = ["--address", self.address, "--resources", '{"worker":1}']
        if host is self.head:
            role = ["--head", "--port", str(PORT), "--resources", '{"head":1}']
            role.append("--include-dashboard=false")
        command = [*host.inside, str(Path(sys.executable).with_name("ray")), "start", "--block"]
        command += [*role, "--node-ip-address", host.address, "--num-cpus", "2"]
        command += ["--temp-dir", str(self.folder / host.address)]
        command += ["--object-store-memory", str(PLASMA_BYTES)]
        self.logs[host.name] = self.folder / f"{host.address}.log"
        with self.logs[host.name].open("wb") as log:
            self.started[host.name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log
            )

    def kill(self, host: Host) -> None:
        """Every process of a host, at once; Ray's have groups of their own."""
        while pids := pids_of(host):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.started[host.name].poll()
            time.sleep(POLL_S)

    def stop_workers(self) -> list[int]:
        """Ends Ray on them, well; returns processes that outlived it. The head must be alive."""
        workers = self.hosts[1:]
        for host in workers:
            self.started[host.name].terminate()
        deadline = time.monotonic() + STOP_S
        while left := [pid for host in workers for pid in pids_of(host)]:
            if time.monotonic() > deadline:
                break
            for host in workers:
                self.started[host.name].poll()
            time.sleep(POLL_S)
        return left

    def kill_gcs(self) -> None:
        """The head's heart stops; its raylet goes on for a while."""
        (gcs,) = (pid for pid in pids_of(self.head) if b"gcs_server" in title_of(pid))
        os.kill(gcs, signal.SIGKILL)


def pids_of(host: Host) -> list[int]:
    """Processes that live in the host's namespace."""
    listed = subprocess.run(
        ("ip", "netns", "pids", host.name), capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def title_of(pid: int) -> bytes:
    """Of a process; empty for one that is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def ray_hosts(number: int) -> Iterator[RayHosts]:
    """A Ray that is up; no process and no namespace is left. Skips where impossible."""
    skip_if_impossible()
    switch = f"tandem-switch-{os.getpid()}"
    hosts = [Host(f"tandem-ray{it}-{os.getpid()}", f"10.78.0.{it + 1}") for it in range(number)]
    with ExitStack() as stack:
        # Paths of Ray's sockets have to be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        stack.enter_context(namespaces(switch, *(it.name for it in hosts)))
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, host in enumerate(hosts):
            end, port = End("cable", host.name), End(f"port{index}", switch)
            stack.enter_context(cable(end, port))
            run("ip", "-n", switch, "link", "set", port.device, "master", "bridge")
            port.set_up()
            end.set_up(f"{host.address}/24")
            stack.callback(host.close)
        rays = RayHosts(hosts, folder, environment_of(folder))
        for host in hosts:
            stack.callback(rays.kill, host)
        rays.start()
        yield rays


def environment_of(folder: Path) -> dict[str, str]:
    """Every host has the token."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "UCX_TLS": "tcp",
    }
