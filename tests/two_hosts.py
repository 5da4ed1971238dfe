"""Two hosts on one machine: network namespaces joined by a veth pair, as by a cable.

Nothing outside them can reach the servers inside. A process or thread inside one sees only its own
loopback and its end of the cable; the file system and the processes are shared. Linux, root.
"""

import ctypes
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.processes import API_KEY, NODE_FLAGS, SECRETS, ServerProcess, kill_all

CLONE_NEWNET = 0x40000000
ANSWER_S = 60.0


class Host:
    """One namespace. Threads that live inside ask the servers inside."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._inside = ThreadPoolExecutor(2, thread_name_prefix=name, initializer=self._enter)
        self._servers: list[ServerProcess] = []

    def launch(self, kind: str, model: Path, log: Path, *flags: str) -> ServerProcess:
        """A node that listens on this host's end of the cable; it does not serve yet."""
        listen = (str(model), *NODE_FLAGS, "--host", self.address, *SECRETS, *flags)
        inside = ("ip", "netns", "exec", self.name)
        server = ServerProcess.launch(log, kind, *listen, inside=inside, UCX_TLS="tcp")
        self._servers.append(server)
        return server

    def ask(self, server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
        """Posts a completion request to a server of this host; the reply."""
        return self.begin(server, body).result()

    def begin(self, server: ServerProcess, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Posts a completion request and does not wait."""
        return self._inside.submit(self._post, f"{server.url}/v1/completions", body)

    def wait_for(self, server: ServerProcess, metric: str, value: float) -> None:
        """Returns when a metric of a server of this host has `value`."""
        self._inside.submit(server.wait_for, metric, value).result()

    def stop(self) -> None:
        """Every server must end well by itself."""
        try:
            for server in self._servers:
                server.stop()
        finally:
            kill_all(self._servers)
            self._inside.shutdown()

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return answer

    def _enter(self) -> None:
        namespace = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(namespace, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(namespace)


@dataclass(slots=True, frozen=True)
class TwoHosts:
    """Host `p`, host `d`, and the cable between them."""

    p: Host
    d: Host

    def set_link(self, state: str) -> None:
        """`up` or `down`: plugs the cable in or pulls it out, on P's side."""
        run("ip", "-n", self.p.name, "link", "set", "cable", state)


def run(*command: str) -> None:
    """Fails with what the command said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    """Both hosts, joined; they and their servers are gone afterwards."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"tandem-{side}-{os.getpid()}" for side in ("p", "d")]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(*("ip", "-n", names[0], "link", "add", "cable"),
            *("type", "veth", "peer", "cable", "netns", names[1]))  # fmt: skip
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        hosts = TwoHosts(*(Host(name, f"10.77.0.{n}") for n, name in enumerate(names, 1)))
        try:
            yield hosts
            hosts.set_link("up")
        finally:
            hosts.d.stop()
            hosts.p.stop()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=30)
