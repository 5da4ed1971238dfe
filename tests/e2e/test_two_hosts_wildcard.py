"""Two hosts as users start them: `--host 0.0.0.0`, a token, no word on transports; and a doctor."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.network.two_hosts import Host, TwoHosts
from tests.support.nodes.asking import question
from tests.support.nodes.forks import run_command
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import API_KEY, SECRETS, ServerProcess

ANYWHERE = ("--host", "0.0.0.0")
ASKED = [question(list(prompt_of(100, salt=salt))) for salt in range(4)]


def ready(server: ServerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/ready", timeout=30) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


def proxy_on(host: Host, log: Path, p: ServerProcess, d: ServerProcess) -> ServerProcess:
    nodes = ("--prefill", p.url, "--decode", d.url, "--port", "0", *SECRETS)
    return host.start("proxy", log, *nodes).wait_until_serving()


def doctor(host: Host, folder: Path, p: ServerProcess, d: ServerProcess) -> str:
    """The doctor's output on a host."""
    keys = ("--cluster-token", SECRETS[3], "--api-key", API_KEY)
    done = run_command(folder, "connector.doctor", p.url, d.url, *keys, settle=host.settle)
    assert not done.stderr, done.stderr
    return done.stdout


def test_wildcard_hosts_with_a_token_hand_over_by_what_reaches_both(
    hosts: TwoHosts, model: Path, tmp_path: Path
) -> None:
    p = hosts.p.launch("prefill_node", model, tmp_path / "p", *ANYWHERE)
    d = hosts.d.launch("decode_node", model, tmp_path / "d", *ANYWHERE)
    near = hosts.p.launch("decode_node", model, tmp_path / "near", *ANYWHERE)
    for server, host in ((p, hosts.p), (d, hosts.d), (near, hosts.p)):
        assert server.wait_until_serving().url.startswith(f"http://{host.address}:")
    alone = [hosts.d.ask(d, each)["choices"][0]["token_ids"] for each in ASKED]
    for host, node, transport in ((hosts.d, d, "nixl"), (hosts.p, near, "shm")):
        proxy = proxy_on(host, tmp_path / f"proxy-{transport}", p, node)
        for each, wanted in zip(ASKED, alone, strict=True):
            assert host.ask(proxy, each)["choices"][0]["token_ids"] == wanted
        assert host.do(node.metrics)["vllm:nixl_bytes_transferred_count"] == len(ASKED)
        (line,) = [line for line in node.said.splitlines() if " is read" in line]
        assert json.loads(line)["transport"] == transport
        nodes = {"d0": "serving", "p0": "serving"}
        assert host.do(ready, proxy) == {"status": "ready", "reasons": [], "nodes": nodes}
        said = doctor(host, tmp_path, p, node)
        assert f"transport: {transport}" in said, said
        assert "WRONG" not in said
    hosts.stop_servers()


@pytest.mark.long
def test_a_p_that_advertises_loopback_costs_local_prefills_said_once(
    hosts: TwoHosts, model: Path, tmp_path: Path
) -> None:
    loopback = (*ANYWHERE, "--advertise-host", "127.0.0.1")
    p = hosts.p.launch("prefill_node", model, tmp_path / "p", *loopback).wait_until_serving()
    d = hosts.d.launch("decode_node", model, tmp_path / "d", *ANYWHERE).wait_until_serving()
    p.url = p.url.replace("127.0.0.1", hosts.p.address)
    proxy = proxy_on(hosts.d, tmp_path / "proxy", p, d)
    alone = hosts.d.ask(d, ASKED[0])["choices"][0]["token_ids"]
    degraded_at = None
    for number in range(60):
        assert hosts.d.ask(proxy, ASKED[0])["choices"][0]["token_ids"] == alone
        if degraded_at is None and hosts.d.do(ready, proxy)["status"] == "degraded":
            degraded_at = number
        if degraded_at is not None and number > degraded_at + 8:
            break
        time.sleep(0.1)
    for server in (d, proxy):
        said = hosts.d.do(ready, server)
        assert said["status"] == "degraded"
        assert "peer_" in said["reasons"][0]
    assert d.said.count("a hand-over failed") == 1
    assert proxy.said.count("a pair of nodes is not used") == 1
    assert hosts.d.do(proxy.metrics)["tandem_proxy_local_prefills_total"] >= 4
    found = doctor(hosts.d, tmp_path, p, d)
    assert "WRONG" in found
    assert "--advertise-host" in found
    hosts.stop_servers()
