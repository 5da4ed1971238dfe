"""Nodes that containers keep apart on one host: they find out what reaches their peers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.nodes.asking import ask, question
from tests.support.nodes.leaks import assert_no_orphans_but, children_of, orphans
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import (
    NODE_FLAGS,
    STOP_S,
    ServerProcess,
    launch_proxy,
    transport_flag,
)
from tests.tiers import everyday

QUESTION = question(list(prompt_of(60, salt=3)))
SMALL = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
IN_A_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# The interpreter may lie in a folder of root's, which only a capability lets others read.
CAPABILITY = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
AS_USER = ("setpriv", "--clear-groups", *CAPABILITY, "--regid=65534")
AS_NOBODY = (*AS_USER, "--reuid=65534")
AS_ANOTHER_USER = (*AS_USER, "--reuid=65533")


class Place(NamedTuple):
    """`inside`: the command that runs a node there. `why`: what keeps others from its memory.

    `others`: the command that runs its peer, as root may look into everybody's memory.
    """

    inside: tuple[str, ...] = ()
    why: str = ""
    others: tuple[str, ...] = ()


PLACES = {
    "pid": Place(IN_A_NAMESPACE, "another pid namespace"),
    "user": Place(AS_ANOTHER_USER, "another user", others=AS_NOBODY),
    "small /dev/shm": Place(("unshare", "--mount", "sh", "-c", SMALL, "sh")),
    "all": Place(
        ("unshare", "--mount", "sh", "-c", SMALL, "sh", *IN_A_NAMESPACE, *AS_ANOTHER_USER),
        "another pid namespace",
        others=AS_NOBODY,
    ),
}
# Where P is, which transport both nodes are given, and which one is used (none: they compute).
DAILY = [("pid", "auto", "nixl")]
CASES = [
    *DAILY,
    ("user", "auto", "nixl"),
    ("small /dev/shm", "auto", "shm"),
    ("all", "auto", "nixl"),
    *((place, name, name) for place in ("pid", "user", "all") for name in ("nixl", "ucx", "zmq")),
    *((place, "shm", "") for place in ("pid", "user")),
]


@pytest.fixture
def model(model: Path) -> Iterator[Path]:
    """A folder that every user can read."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(model, Path(folder, "model"))
        for path in (Path(folder), copy, *copy.iterdir()):
            path.chmod(0o755)
        yield copy


def skip_if_impossible(place: Place) -> None:
    """Skips with what forbids such a place."""
    command = [*place.inside, sys.executable, "-c", ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STOP_S, check=False)
    except OSError as error:
        pytest.skip(f"nodes cannot be kept apart here: {error}")
    if done.returncode:
        pytest.skip(f"nodes cannot be kept apart here: {done.stderr.strip()}")


def launch(place: Place, log: Path, kind: str, model: Path, *flags: str) -> ServerProcess:
    """A node in a place; it does not serve yet."""
    home = str(model.parent)  # that of root is closed to others
    return ServerProcess.launch(
        log, kind, str(model), *NODE_FLAGS, *flags, inside=place.inside, HOME=home
    )


def stop(place: Place, server: ServerProcess) -> None:
    """SIGTERM for the node itself: `unshare` stays its parent, and ends as it does."""
    pid = server.process.pid
    if IN_A_NAMESPACE[0] in place.inside and "--fork" in place.inside:
        (pid,) = children_of(pid)
    os.kill(pid, signal.SIGTERM)
    assert server.process.wait(STOP_S) == 0, server.said


@pytest.mark.parametrize("case", everyday(CASES, DAILY), ids=" ".join)
async def test_a_hand_over_from_another_place(
    model: Path, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    name, transport, used = case
    place = PLACES[name]
    skip_if_impossible(place)
    names = orphans()
    flags = () if transport == "auto" else transport_flag(transport)
    p = launch(place, tmp_path / "p", "prefill_node", model, *flags)
    here = Place(place.others)
    d = launch(here, tmp_path / "d", "decode_node", model, *flags)
    started = [(place, p), (here, d)]
    try:
        for _, server in started:
            server.wait_until_serving()
        proxy = launch_proxy(tmp_path / "proxy", p, d)
        started.append((Place(), proxy))
        proxy.wait_until_serving().wait_for("tandem_proxy_available_nodes", 2)
        alone = (await ask(d.url, QUESTION)).token_ids
        assert (await ask(proxy.url, QUESTION)).token_ids == alone
        moved = d.metrics().get("tandem:kv_transfer_bytes_total", 0.0)
        if used:
            assert moved > 0, d.said
            assert {line["transport"] for line in lines_of(d, "a peer is read")} <= {used}
        else:
            # P's answer and the reason why it was not pulled.
            assert moved == 0
            (line,) = lines_of(d, "a hand-over failed; the prompt is computed again")
            assert line["cause"] == "peer_does_not_fit"
            assert place.why in line["error"]
            assert "transport auto" in line["error"]
        while started:
            stop(*started[-1])
            started.pop()
    finally:
        for _, server in started:
            if server.process.poll() is None:
                server.kill()
    assert_no_orphans_but(names)


def lines_of(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    """Its log lines of one kind."""
    lines = [line for line in server.said.splitlines() if line.startswith("{")]
    return [line for line in map(json.loads, lines) if line["event"] == event]
