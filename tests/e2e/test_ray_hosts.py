"""A cluster on a Ray of several hosts, of which one is lost; and a Ray that is dead."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network.two_hosts import HandOvers, Host
from tests.support.nodes.asking import question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.ray_hosts import RayHosts, pids_of, ray_hosts, title_of

WHOLE_S = 120.0
"""For a start, and for the next life of a member, which is one."""
PATIENCE_S = 20.0
"""Shorter than that of Ray, which waits half a minute for a head that does not answer."""
LOOPBACK = "127.0.0.2"
"""For 127.0.0.1 Ray takes another address of the machine."""
PROMPT = list(prompt_of(100, salt=3))
MEMBERS = {"prefill-0", "decode-0", "proxy-0"}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def rays() -> Iterator[RayHosts]:
    """A head, and three workers with room for one node each."""
    with ray_hosts(4) as started:
        yield started


def apply(rays: RayHosts, model: Path, transport: str) -> None:
    """The proxy comes to the head, P and D to workers; returns when all serve."""
    extra = {"kv_connector_extra_config": {"transport": transport}}
    cluster = {
        "name": transport,
        "model": str(model),
        "config": {
            "host": "auto",
            "kv_cache_memory_bytes": 16 << 20,
            "served_model_name": ["tiny"],
            "enable_prefix_caching": False,  # every request has to be pulled
            "kv_transfer_config": {"kv_connector": "PdConnector", **extra},
        },
        "prefill": {"resources": {"worker": 1}},
        "decode": {"resources": {"worker": 1}},
        "proxy": {
            "resources": {"head": 1},
            "config": {"host": "auto", "port": 0, "enable_prompt_tokens_details": True},
        },
    }
    file = rays.folder / f"{transport}.yaml"
    file.write_text(json.dumps(cluster))
    done = rays.deploy("apply", str(file), seconds=WHOLE_S)
    assert done.returncode == 0, done


def serving(rays: RayHosts) -> dict[str, str]:
    """URLs of the members that serve, by name; `deploy status` must be well once all do."""
    done = rays.deploy("status")
    found = dict(re.findall(r"(\w+-\d) +serving +(http://\S+)", done.stdout))
    assert done.returncode == (0 if found.keys() == MEMBERS else 1), done
    return found


def host_of(rays: RayHosts, url: str) -> Host:
    (host,) = (it for it in rays.hosts if f"//{it.address}:" in url)
    return host


def ask(rays: RayHosts, url: str) -> tuple[list[int], int]:
    """Tokens, and how many bytes were pulled for them."""
    return HandOvers.read(rays.head.do(rays.head.post, f"{url}/v1/completions", question(PROMPT)))


def hand_over(rays: RayHosts, urls: dict[str, str]) -> list[int]:
    """The tokens through the proxy, which come from two hosts and equal those of P alone."""
    assert len({host_of(rays, it).name for it in urls.values()}) == len(MEMBERS)
    tokens, pulled = ask(rays, urls["proxy-0"])
    assert pulled
    assert tokens == ask(rays, urls["prefill-0"])[0]
    return tokens


def down(rays: RayHosts) -> None:
    """Ray goes on, and no process of Tandem's is left on it."""
    assert rays.deploy("down").returncode == 0
    left = rays.deploy("status")
    assert left.returncode == 3, left
    titles = [title_of(pid) for host in rays.hosts for pid in pids_of(host)]
    assert titles and not [it for it in titles if it.startswith(b"ray::") and b"Actor" in it]


@pytest.mark.long
def test_hosts_hand_over_by_zmq(rays: RayHosts, model: Path) -> None:
    apply(rays, model, "zmq")
    hand_over(rays, serving(rays))
    down(rays)


@pytest.mark.long
def test_a_decode_node_comes_back_on_another_host(rays: RayHosts, model: Path) -> None:
    apply(rays, model, "nixl")
    # Where no lost worker takes it along.
    assert any(b"ControllerActor" in title_of(pid) for pid in pids_of(rays.head))
    urls = serving(rays)
    tokens = hand_over(rays, urls)
    lost = host_of(rays, urls["decode-0"])
    rays.kill(lost)
    deadline = time.monotonic() + WHOLE_S
    while (now := serving(rays)).keys() != MEMBERS or now["decode-0"] == urls["decode-0"]:
        assert time.monotonic() < deadline, rays.deploy("status").stdout
    assert host_of(rays, now["decode-0"]) is not lost
    assert now["proxy-0"] == urls["proxy-0"]
    assert hand_over(rays, now) == tokens
    down(rays)


@pytest.mark.long
def test_workers_leave_nothing_and_a_dead_head_is_an_error_within_seconds(rays: RayHosts) -> None:
    """The last test on these hosts."""
    assert rays.stop_workers() == []
    rays.kill_gcs()
    assert_one_sentence(rays.deploy("status", seconds=PATIENCE_S), rays.address)


def test_no_ray_is_an_error_within_seconds() -> None:
    with socket.create_server((LOOPBACK, 0)) as closed:
        address = f"{LOOPBACK}:{closed.getsockname()[1]}"
    done = subprocess.run(
        command(address), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert_one_sentence(done, address)


def test_ctrl_c_ends_the_wait_for_a_ray_that_does_not_answer() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        silent.settimeout(PATIENCE_S)
        address = f"{LOOPBACK}:{silent.getsockname()[1]}"
        with subprocess.Popen(command(address), stdout=subprocess.DEVNULL) as waiting:
            try:
                # The first connection only looks whether somebody listens; the next one is Ray's.
                connections = [silent.accept()[0] for _ in range(2)]
                waiting.send_signal(signal.SIGINT)
                assert waiting.wait(PATIENCE_S / 2) == 130
            finally:
                waiting.kill()
        for connection in connections:
            connection.close()


def command(address: str) -> list[str]:
    return [sys.executable, "-m", "deploy", "status", "--address", address]


def assert_one_sentence(done: subprocess.CompletedProcess[str], address: str) -> None:
    assert done.returncode == 2, done
    assert re.fullmatch(rf"error: no Ray at {address}: .+\n", done.stderr), done
