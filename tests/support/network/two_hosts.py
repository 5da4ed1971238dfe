"""Two hosts on one machine: network namespaces joined by cables and a relay, as by a switch.

Nothing outside them can reach the servers inside.
"""

import json
import os
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.network.netns import (
    End,
    cable,
    enter,
    move_in,
    namespaces,
    see_file,
    skip_if_impossible,
)
from tests.support.network.relay import Relay
from tests.support.nodes.asking import REMOTE_DECODE, question
from tests.support.nodes.pairs import arena_for
from tests.support.nodes.processes import API_KEY, NODE_FLAGS, SECRETS, ServerProcess, kill_all

ANSWER_S = 60.0
MAX_TOKENS = 120
MID_PULL_BYTES = 20_000  # more than all control messages of a hand-over, less than its blocks
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Made = TypeVar("Made")


class Host:
    """One namespace. Threads that live inside ask the servers inside."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._boot_id = Path(tempfile.gettempdir(), f"{name}.boot_id")
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        inside = partial(enter, name)
        self._inside = ThreadPoolExecutor(3, thread_name_prefix=name, initializer=inside)
        self.servers: list[ServerProcess] = []

    @property
    def inside(self) -> tuple[str, ...]:
        """Runs a command on this host, where it sees a kernel that was booted on its own."""
        seen = f'mount --bind "$0" {BOOT_ID} && exec "$@"'
        return ("ip", "netns", "exec", self.name, "sh", "-c", seen, str(self._boot_id))

    @property
    def settle(self) -> Callable[[], None]:
        """The same for a fork, which calls this first."""
        return partial(_settle, self.name, self._boot_id)

    def launch(self, kind: str, model: Path, log: Path, *flags: str) -> ServerProcess:
        """A node that listens on this host's end of the cable; it does not serve yet."""
        return self.start(
            kind, log, str(model), *NODE_FLAGS, "--host", self.address, *SECRETS, *flags
        )

    def start(self, kind: str, log: Path, *flags: str) -> ServerProcess:
        """A server that does not serve yet."""
        server = ServerProcess.launch(log, kind, *flags, inside=self.settle, UCX_TLS="tcp")
        self.servers.append(server)
        return server

    def ask(self, server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
        """Posts a completion request to a server of this host; the reply."""
        return self.begin(server, body).result()

    def begin(self, server: ServerProcess, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Posts a completion request and does not wait."""
        return self._inside.submit(self.post, f"{server.url}/v1/completions", body)

    def do(self, action: Callable[..., Made], *arguments: object) -> Made:
        """Runs an action that talks to servers of this host; returns its result."""
        return self._inside.submit(action, *arguments).result()

    def remember_start_values(self) -> None:
        """Records what the servers hold now, which is all that they may hold at rest."""
        for server in self.servers:
            self.do(server.remember_start_value)

    def assert_at_rest(self) -> None:
        """None of the servers holds more than it may."""
        for server in self.servers:
            self.do(server.assert_at_rest)

    def stop_servers(self) -> None:
        """Every server must end well by itself."""
        servers, self.servers = self.servers, []
        try:
            for server in servers:
                server.stop()
        finally:
            kill_all(servers)

    def close(self) -> None:
        """No server and no thread is left."""
        try:
            self.stop_servers()
        finally:
            self._boot_id.unlink(missing_ok=True)
            self._inside.shutdown()

    def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply. Only in a thread of this host: see `do`."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return answer


def _settle(name: str, boot_id: Path) -> None:
    move_in(name)
    see_file(boot_id, BOOT_ID)


@dataclass(slots=True, frozen=True)
class TwoHosts:
    """Host `p`, host `d`, P's end of what joins them, and the relay in the middle."""

    p: Host
    d: Host
    plug: End
    relay: Relay

    def set_link(self, state: str) -> None:
        """`up` or `down`: plugs the cable in or pulls it out, on P's side."""
        self.plug.set_link(state)

    def start_pair(
        self, model: Path, logs: Path, config: str, *d_flags: str
    ) -> tuple[ServerProcess, ServerProcess]:
        """P and D, serving, with one kv_transfer_config; the pair before them is stopped."""
        self.stop_servers()
        flag = ("--kv-transfer-config", config)
        p = self.p.launch("prefill_node", model, logs / "p", *flag)
        d = self.d.launch("decode_node", model, logs / "d", *flag, *d_flags)
        return p.wait_until_serving(), d.wait_until_serving()

    def stop_servers(self) -> None:
        """Every server must end well by itself."""
        self.d.stop_servers()
        self.p.stop_servers()

    def remember_start_values(self) -> None:
        """Records what the servers hold now, which is all that they may hold at rest."""
        self.p.remember_start_values()
        self.d.remember_start_values()

    def assert_at_rest(self) -> None:
        """No server holds more than it may."""
        self.p.assert_at_rest()
        self.d.assert_at_rest()

    def mend(self) -> None:
        """A short, whole cable again."""
        self.set_link("up")
        self.relay.go_on()
        self.relay.be_far(0.0, 0.0)
        self.relay.lose(0.0)


def transfers(transport: str, **extra: float) -> str:
    """A kv_transfer_config."""
    return json.dumps({"kv_connector_extra_config": {"transport": transport, **extra}})


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Both hosts, joined; they and their servers are gone afterwards. Skips where impossible."""
    skip_if_impossible()
    names = [f"tandem-{part}-{os.getpid()}" for part in ("p", "d", "switch")]
    p, d = [Host(name, f"10.77.0.{number}") for number, name in enumerate(names[:2], 1)]
    with ExitStack() as stack:
        stack.enter_context(namespaces(*names))
        for host, port in ((p, "far"), (d, "near")):
            end, middle = End("cable", host.name), End(port, names[2])
            stack.enter_context(cable(end, middle))
            middle.set_up()
            end.set_up(f"{host.address}/24")
        relay = Relay(names[2], near="near", far="far")
        stack.callback(relay.stop)
        for host in (p, d):
            stack.callback(host.close)
        hosts = TwoHosts(p, d, End("cable", p.name), relay)
        stack.callback(hosts.mend)
        yield hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    """One pair of hosts for all tests of a module."""
    with two_hosts() as made:
        yield made


@dataclass(slots=True)
class HandOvers:
    """From `p` of host `p` to `d` of host `d`, over HTTP."""

    hosts: TwoHosts
    p: ServerProcess
    d: ServerProcess

    @classmethod
    def between(cls, hosts: TwoHosts, model: Path, logs: Path, config: str) -> "HandOvers":
        """A new pair of nodes, of which D has room for one request of `MAX_TOKENS`."""
        arena = ("--kv-cache-memory-bytes", str(arena_for(model, MAX_TOKENS)))
        return cls(hosts, *hosts.start_pair(model, logs, config, *arena))

    def alone(self, prompt: list[int], **changes: object) -> list[int]:
        """The tokens of D alone."""
        return self.finish(question(prompt, **changes))[0]

    def prefill(self, prompt: list[int], **changes: object) -> dict[str, Any]:
        """P's part; the request for D, with `changes`."""
        asked = question(prompt, kv_transfer_params=REMOTE_DECODE, **(changes | {"max_tokens": 1}))
        params = self.hosts.p.ask(self.p, asked)["kv_transfer_params"]
        return question(prompt, kv_transfer_params=params, **changes)

    def finish(self, asked: dict[str, Any]) -> tuple[list[int], int]:
        """D's part: the tokens, and how many bytes were pulled for them."""
        return self.read(self.hosts.d.ask(self.d, asked))

    def begin_and_hold(self, asked: dict[str, Any]) -> Future[dict[str, Any]]:
        """D's part, up to the middle of its pull: from then on the relay passes nothing."""
        self.hosts.relay.hold_behind(MID_PULL_BYTES)
        answer = self.hosts.d.begin(self.d, asked)
        assert self.hosts.relay.holds(ANSWER_S), "too few bytes were pulled"
        return answer

    def until_they_work(self, prompt: list[int]) -> None:
        """Connections come back, at the latest when their back-off is over; tokens are right."""
        alone = self.alone(prompt)
        deadline = time.monotonic() + ANSWER_S
        pulled = 0
        while not pulled:
            assert time.monotonic() < deadline, "the cable is whole, but hand-overs do not work"
            tokens, pulled = self.finish(self.prefill(prompt))
            assert tokens == alone

    @staticmethod
    def read(answer: dict[str, Any]) -> tuple[list[int], int]:
        """The tokens of a reply, and how many bytes were pulled for them."""
        moved = answer["usage"].get("kv_transfer") or {}
        pulled = moved.get("attention_bytes", 0) + moved.get("state_bytes", 0)
        return answer["choices"][0]["token_ids"], pulled
