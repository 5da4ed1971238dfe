"""Servers whose log nobody takes any more: all is served as before, and the end is a good one."""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.nodes.asking import ask, question
from tests.support.nodes.forks import Fork
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import (
    NODE_FLAGS,
    POLL_S,
    START_S,
    STOP_S,
    ServerProcess,
    free_port,
    kill_all,
)

QUESTION = question(list(prompt_of(60, salt=3)))
DROPPED = "tandem:log_lines_dropped_total"
DISK_BYTES = 16_384

KindOfLog = Callable[[Path], AbstractContextManager[tuple[Path, Callable[[], None]]]]


def fork(kind: str, log: Path, *flags: str) -> ServerProcess:
    """A server that cannot tell its URL, as its log may be gone."""
    port = free_port()
    process = Fork(kind, (*flags, "--port", str(port)), log, dict(os.environ))
    return ServerProcess(kind, log, process, url=f"http://127.0.0.1:{port}")


def wait_until_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + START_S
    while server.process.poll() is None:
        with suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{server.url}/ready", timeout=STOP_S).close()
            return
        assert time.monotonic() < deadline, f"{server.name} is not ready"
        time.sleep(POLL_S)
    raise AssertionError(f"{server.name} ended with {server.process.poll()}")


@contextmanager
def log_that_is_read(folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A named pipe, and what ends its reader."""
    path = folder / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, lambda: os.close(reader)


@contextmanager
def log_on_a_disk(folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A file on a disk of its own, and what fills this disk."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=STOP_S, check=False)
    if done.returncode:
        pytest.skip(f"a full disk needs a mount: {done.stderr.strip()}")

    def fill() -> None:
        with suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        # The log's last page has room left, which its next lines would get.
        with suppress(OSError), (disk / "log").open("ab", buffering=0) as file:
            while True:
                file.write(b"\n")

    try:
        yield disk / "log", fill
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=STOP_S)


@pytest.mark.parametrize(
    ("kind_of_log", "at_start"),
    [
        (log_that_is_read, False),
        (log_on_a_disk, True),
        pytest.param(log_on_a_disk, False, marks=pytest.mark.long),
    ],
)
async def test_a_hand_over_without_a_log(
    model: Path, tmp_path: Path, kind_of_log: KindOfLog, at_start: bool
) -> None:
    servers: list[ServerProcess] = []
    with kind_of_log(tmp_path) as (log, lose):
        try:
            if at_start:
                lose()
            p, d = (
                fork(kind, log, str(model), *NODE_FLAGS) for kind in ("prefill_node", "decode_node")
            )
            servers += [p, d]
            servers.append(proxy := fork("proxy", log, "--prefill", p.url, "--decode", d.url))
            for server in servers:
                wait_until_ready(server)
            proxy.wait_for("tandem_proxy_available_nodes", 2)
            if not at_start:
                lose()
            before = [server.metrics()[DROPPED] for server in servers]
            through_both = (await ask(proxy.url, QUESTION)).token_ids
            alone = (await ask(p.url, QUESTION)).token_ids
            assert through_both == alone and len(alone) == QUESTION["max_tokens"]
            assert d.metrics()["tandem:kv_transfer_bytes_total"] > 0
            for server, dropped in zip(servers, before, strict=True):
                server.wait_for_at_least(DROPPED, dropped + 1)
                server.process.terminate()
            assert [server.process.wait(STOP_S) for server in reversed(servers)] == [0, 0, 0]
        finally:
            kill_all(servers)
