"""Processes are found, told apart and ended."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from deploy.process import descendants, is_alive, wait_gone

SLEEPER = "import subprocess, sys; subprocess.run(['sleep', '60'])"
PARENT = f"""
import subprocess, sys
from deploy.process import end_descendants, descendants
subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
while len(descendants()) < 2:
    pass
print(*(each.pid for each in descendants()), flush=True)
sys.stdin.readline()
end_descendants(0.0)
end_descendants(0.0)  # of nobody
"""

PARENT_OF_AN_ORPHAN = """
import subprocess
from deploy.process import adopt_orphans, end_descendants
adopt_orphans()
subprocess.run("sleep 60 > /dev/null & echo $!", shell=True)
end_descendants(0.0)
"""

RAY_STARTER = """
import signal
from deploy.ray_cluster import RayThread
blocked = RayThread().call("look", 30.0, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(*sorted(each.name for each in blocked), flush=True)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


def test_grandchildren_are_ended_too() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        found = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(found) == 2
        parent.communicate(b"\n", timeout=60)
    assert parent.returncode == 0
    assert wait_gone(found, 0.0) == set()


def test_so_are_those_whose_parent_has_ended_before() -> None:
    """As workers of a raylet that ends first."""
    command = [sys.executable, "-c", PARENT_OF_AN_ORPHAN]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True).stdout)
    assert not psutil.pid_exists(pid) or not is_alive(psutil.Process(pid))


def test_a_zombie_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    now = psutil.Process(sleeper.pid)
    assert now in descendants()
    assert wait_gone([now], 0.0) == {now}
    sleeper.kill()
    assert wait_gone([now], 10.0) == set()
    assert now.status() == psutil.STATUS_ZOMBIE
    assert not is_alive(now)
    assert now not in descendants()


def test_signals_to_a_whole_group_spare_the_ray_that_a_command_starts() -> None:
    """Else a service manager's SIGTERM ends Ray before the cluster on it could be stopped."""
    with subprocess.Popen([sys.executable, "-c", RAY_STARTER], stdout=subprocess.PIPE) as starter:
        said, _ = starter.communicate(timeout=60)
    assert said.decode().split() == ["SIGHUP", "SIGINT", "SIGTERM"]
