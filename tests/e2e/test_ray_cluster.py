"""Clusters on Ray: three raylets on this machine, the `deploy` commands, and the demo."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from deploy.process import is_alive
from deploy.session import FOLDER_PREFIX, ClusterState, read_state
from engine.errors import UnavailableError
from tests.support.nodes.leaks import assert_no_orphans_but, orphans
from tests.support.nodes.ray_driver import Report, complete

ROOT = Path(__file__).parents[2]
START_S = 90.0
LATE_S = 30
"""Longer than a question to a controller waits."""
REPORT_S = 540.0  # a report takes a minute, and many on a machine that is busy elsewhere
pytestmark = pytest.mark.timeout(600)
CLUSTER = """
model: model
prefill: {config: {kv_cache_memory_bytes: 16777216, served_model_name: [tiny]}}
decode: {config: {kv_cache_memory_bytes: 16777216, served_model_name: [tiny]}}
proxy: {config: {port: 0}}
"""


@pytest.fixture(scope="module")
def report(model: Path) -> Report:
    """One run of the driver, on which several tests look."""
    before = orphans()
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests/support/nodes/ray_driver.py"),
            str(model),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=REPORT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    assert_no_orphans_but(before)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


@pytest.mark.long
def test_members_are_on_three_machines_and_equal_one_node(report: Report) -> None:
    assert report.machines == {
        "prefill-0": "127.0.0.1",
        "decode-0": "127.0.0.2",
        "proxy-0": "127.0.0.3",
    }
    assert report.through_proxy == report.by_one_node
    assert len(report.through_proxy) == 8
    assert report.pulled_bytes > 0


@pytest.mark.long
def test_a_node_whose_engine_died_begins_again_and_is_used(report: Report) -> None:
    assert report.after_engine_death == report.through_proxy
    assert not report.same_engine
    assert report.log_of_engine.count('"event": "node serves"') == 2


@pytest.mark.long
def test_of_two_commands_at_once_one_applies_and_both_leave_the_cluster_whole(
    report: Report,
) -> None:
    none, refused = report.racing
    assert none == ""
    assert "somebody else has changed the cluster meanwhile" in refused


@pytest.mark.long
def test_several_clusters_share_a_ray_each_with_its_gpus_and_proxies(report: Report) -> None:
    assert report.names == ["other", "three"]
    decode, proxies = report.of_other[:2], report.of_other[2:]
    assert decode == ["decode-0 127.0.0.3", "decode-1 127.0.0.3"]
    assert len({text.split()[1] for text in proxies}) == 2
    assert sorted(report.gpus) == ["0", "1"]
    assert report.through_other == report.through_proxy


@pytest.mark.long
def test_a_decode_node_is_drained_added_and_replaced(report: Report) -> None:
    drained, added, replaced = report.lives
    assert drained == ["decode-1 1"]
    assert added == ["decode-0 2", "decode-1 1"]
    assert replaced == ["decode-0 2", "decode-1 2"]
    assert "no member is called decode; there are decode-0, decode-1" in report.drained_role


@pytest.mark.long
def test_what_cannot_be_is_told_plainly(report: Report) -> None:
    assert "no machine has room for CPU 0.1, GPU 8" in report.too_much
    assert "no machine has the labels zone=q" in report.wrong_label
    assert "kv_cache_memory_bytes" in report.wrong_option or "1000" in report.wrong_option
    code, _, said = report.wrong_token.partition(" ")
    assert code == "2"
    assert "or another token" in said.splitlines()[-1]
    assert "cannot run Tandem (ModuleNotFoundError: No module" in report.unknown_there
    assert "runtime_env" in report.unknown_there
    assert report.own_environment


@pytest.mark.long
def test_other_work_on_a_machine_does_not_go_before_members(report: Report) -> None:
    """Ray's own workers give way to any other process."""
    assert report.niceness == {os.nice(0)}


@pytest.mark.long
def test_stopping_leaves_no_actor_and_no_process(report: Report) -> None:
    assert report.left == []


@dataclass(slots=True)
class Up:
    """`python -m deploy up` in a process of its own, with a state file of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    environment: dict[str, str]

    @property
    def state(self) -> ClusterState:
        return read_state(Path(self.environment["XDG_RUNTIME_DIR"]) / f"tandem-{os.getuid()}.json")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `python -m deploy`, of the same user."""
        return subprocess.run(
            [sys.executable, "-m", "deploy", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def wait_until_up(self) -> str:
        """Waits until the cluster is up; returns its output until then."""
        deadline = time.monotonic() + START_S
        while "Ctrl-C stops" not in (said := self.log.read_text()):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        return said


@contextmanager
def cluster_of(text: str, folder: Path) -> Iterator[Up]:
    """A cluster of this file, started from elsewhere; ended well, in any case."""
    (folder / "cluster.yaml").write_text(text)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    log = folder / "up.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy", "up", str(folder / "cluster.yaml")],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Up(process, log, environment)
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


@pytest.fixture
def up(model: Path, tmp_path: Path) -> Iterator[Up]:
    """A cluster file beside its model."""
    (tmp_path / "model").symlink_to(model)
    with cluster_of(CLUSTER, tmp_path) as started:
        yield started


def test_up_status_and_down(up: Up) -> None:
    before = orphans()
    said = up.wait_until_up()
    url = _url_of_proxy(said)
    assert url.startswith("http://127.0.0.1:")
    folder, processes = Path(up.state.folder), below(up.process.pid)
    assert folder.stat().st_mode & 0o077 == 0
    assert _listening_elsewhere(processes) == []
    assert len(complete(url)[0]) == 8

    listed = up.command("status")
    assert listed.returncode == 0, listed.stderr
    assert _url_of_proxy(listed.stdout) == url
    second = up.command("up")
    assert second.returncode == 2
    assert "a cluster is up already" in second.stderr
    scaled = up.command("scale", "decode=2")
    assert scaled.returncode == 0, scaled.stderr
    assert "decode 2 of 2" in scaled.stdout
    assert "node serves" in up.command("logs", "decode-1").stdout

    stopped = up.command("down")
    assert stopped.returncode == 0, stopped.stderr
    assert up.process.wait(1) == 0
    assert not list(filter(is_alive, processes))
    assert not folder.exists()
    assert_no_orphans_but(before)
    with pytest.raises(UnavailableError, match="no cluster is up"):
        _ = up.state


@pytest.mark.long
@pytest.mark.parametrize("name", ["kv_both", "shared_tiers"])
def test_an_example_starts_and_answers(name: str, model: Path, tmp_path: Path) -> None:
    """With a small model in place of a large one, few nodes, and a folder of the test's."""
    text = (ROOT / f"deploy/configs/{name}.yaml").read_text()
    for found, mine in (
        (r"^model: .*", f"model: {model}"),
        (r"/srv/kv", str(tmp_path / "kv")),
        (r"\[(tandem|qwen)\]", "[tiny]"),
        (r"port: 8000", "port: 0"),
        (r"num_cpus: \d", "num_cpus: 0.1"),
        (r"replicas: 3", "replicas: 2"),
        (r"(memory_bytes|host_bytes|disk_bytes): \d+", r"\1: 33554432"),
    ):
        text = re.sub(found, mine, text, flags=re.M)
    with cluster_of(text, tmp_path) as example:
        assert len(complete(_url_of_proxy(example.wait_until_up()))[0]) == 8


@pytest.mark.long
def test_a_controller_that_begins_late_is_awaited(model: Path, tmp_path: Path) -> None:
    """As where Ray has to install what it needs: later than any question is answered."""
    (tmp_path / "model").symlink_to(model)
    python = tmp_path / "late_python"
    python.write_text(
        f"#!/bin/sh\nmkdir {tmp_path}/once 2>/dev/null && sleep {LATE_S}\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    with cluster_of(f"{CLUSTER}runtime_env: {{py_executable: {python}}}\n", tmp_path) as late:
        assert len(complete(_url_of_proxy(late.wait_until_up()))[0]) == 8


@pytest.mark.long
def test_what_a_controller_cannot_have_is_told_in_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "cluster.yaml").write_text(f"{CLUSTER}runtime_env: {{pip: [no-such-package]}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "up", str(tmp_path / "cluster.yaml")],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 2, done
    assert re.fullmatch(r"error: start the controller: \S.+\n", done.stderr), done.stderr
    (kept,) = re.findall(r"logs are kept in (\S+)", done.stdout)
    shutil.rmtree(kept)


@pytest.mark.long
def test_make_serve_is_seen_and_a_signal_to_all_its_processes_ends_it_cleanly(
    tmp_path: Path,
) -> None:
    """All processes get SIGTERM at the same time, as service managers send it."""
    log = tmp_path / "log"
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.demo", "--keep", "--port", "0"],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    served = Up(process, log, environment)
    said = served.wait_until_up()
    url = re.findall(r"serves (http://\S+)/v1", said)[0]
    assert _url_of_proxy(served.command("status").stdout) == url
    processes, folder = below(process.pid), Path(served.state.folder)
    for each in processes:
        os.kill(each.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    assert not list(filter(is_alive, processes))
    assert not folder.exists()
    with pytest.raises(UnavailableError, match="no cluster is up"):
        _ = served.state


@pytest.mark.long
def test_the_demo_shows_equal_tokens_and_leaves_nothing() -> None:
    names, folders = orphans(), _session_folders()
    processes: set[psutil.Process] = set()
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.demo", "--prefill", "2", "--decode", "2"],
        env={**os.environ, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        said = ""
        for line in demo.stdout:
            said += line
            processes |= below(demo.pid)
    assert demo.returncode == 0, said
    rows = re.findall(r"^ (completion|chat|turn \d of 3) +(\d+) +(\d+)", said, re.M)
    assert len(rows) == 5
    choice = r"^ \S.* (prefill-[01]) +(decode-[01]) +(\w+) +(\d+) +(\d+) +(\d+) +(\d+)"
    choices = re.findall(choice, said, re.M)
    assert len(choices) == 5
    # The events of turn 1 lead turn 2 to its nodes, which have at least what the router expects.
    assert [reason for *_, reason, _, _, _, _ in choices[3:]] == ["prefix", "prefix"]
    for *_, on_p, hit_p, on_d, hit_d in choices:
        assert int(on_p) <= int(hit_p) and int(on_d) <= int(hit_d), said
    assert "tokens equal those of a single kv_both node" in said
    assert len(processes) > 3
    assert not list(filter(is_alive, processes))
    assert _session_folders() <= folders
    assert_no_orphans_but(names)


def _session_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


def _url_of_proxy(table: str) -> str:
    found = re.search(r"clients ask (http://\S+)/v1", table)
    assert found, table
    return found[1]


def below(pid: int) -> set[psutil.Process]:
    return set(psutil.Process(pid).children(recursive=True))


def _listening_elsewhere(processes: set[psutil.Process]) -> list[str]:
    """Addresses other than the loopback one on which these processes accept connections."""
    inodes = {link for process in processes for link in _links(process.pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            loopback = fields[1].startswith(("0100007F:", "0" * 24 + "01000000:")) or (
                "FFFF00000100007F:" in fields[1]
            )
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes and not loopback:
                found.append(fields[1])
    return found


def _links(pid: int) -> set[str]:
    folder = f"/proc/{pid}/fd"
    try:
        return {os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}
    except OSError:
        return set()


@pytest.mark.long
def test_a_cluster_starts_and_ends_by_few_files(report: Report) -> None:
    """See test_ways.py; of what the members' own processes run, nothing counts."""
    opened = [name for name in report.opened if name.startswith("deploy/")]
    assert len(opened) <= 3, opened
