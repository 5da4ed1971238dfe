"""Processes are found, told apart and ended; leftovers of the demo are seen."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.leftovers import SHARED_MEMORY, Leftovers
from deploy.process_tree import (
    ProcessId,
    descendants,
    end_descendants,
    process_id,
    wait_gone,
)

SLEEPER = "import subprocess, sys; subprocess.run(['sleep', '60'])"
PARENT = f"""
import subprocess, sys, os
from deploy.process_tree import end_descendants, descendants
subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
while len(descendants(os.getpid())) < 2:
    pass
for each in descendants(os.getpid()):
    print(each.pid, each.started, flush=True)
end_descendants(os.getpid(), 0.0)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


def test_grandchildren_are_ended_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=60, check=True
    )
    found = [ProcessId(*map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == 2
    assert wait_gone(found, 0.0) == set()


def test_a_process_with_a_reused_pid_is_another_one(sleeper: subprocess.Popen[bytes]) -> None:
    now = process_id(sleeper.pid)
    assert now is not None
    assert now.is_alive
    assert not ProcessId(now.pid, now.started - 1).is_alive
    assert now in descendants(os.getpid())


def test_a_zombie_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    now = process_id(sleeper.pid)
    assert now is not None
    assert wait_gone([now], 0.0) == {now}
    sleeper.kill()
    assert wait_gone([now], 10.0) == set()
    assert now not in descendants(os.getpid())


def test_waiting_for_nobody_ends() -> None:
    end_descendants(0x7FFFFFFF, 0.0)


def test_leftovers_are_seen(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    leftovers = Leftovers()
    segment = SHARED_MEMORY / f"tandem-test-{uuid.uuid4().hex}"
    leftovers.watch_folder(tmp_path)
    leftovers.watch_folder(tmp_path / "gone")
    try:
        segment.write_bytes(b"x")
        found = leftovers.find(0.0)
    finally:
        segment.unlink()
    assert f"process {sleeper.pid}" in found
    assert str(tmp_path) in found
    assert str(tmp_path / "gone") not in found
    assert str(segment) in found
