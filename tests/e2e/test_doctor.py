"""`python -m connector.doctor` on real nodes: what it says of a healthy pair and of wrong ones."""

import asyncio
import dataclasses
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from rich.console import Console

from connector.doctor.__main__ import examine
from connector.doctor.canary import _judge, _Reply
from connector.doctor.compare import compare
from connector.doctor.findings import Finding, Verdict
from connector.doctor.probe import probe
from connector.transports.shm import ShmAddress
from engine.errors import ConfigError
from engine.types import KVTransferStats
from serving.node.server import NodeServer
from serving.rpc.node_http import HttpNode
from tests.support.nodes.cluster import Cluster, transfer_config
from tests.support.nodes.forks import run_command
from tests.support.nodes.processes import API_KEY, CLUSTER_TOKEN, ServedCluster

KEYS = ("--cluster-token", CLUSTER_TOKEN, "--api-key", API_KEY)


class Doctor(Protocol):
    """Exit code and lines of the command."""

    def __call__(self, *arguments: str) -> tuple[int, list[str]]: ...


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    def ask(*arguments: str) -> tuple[int, list[str]]:
        done = run_command(tmp_path, "connector.doctor", *arguments)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()

    return ask


def test_a_healthy_pair_is_found_well(served: ServedCluster, doctor: Doctor) -> None:
    code, lines = doctor(served.p.url, served.d.url, *KEYS)
    assert code == 0, lines
    assert all(line.startswith("ok ") for line in lines), lines
    told = "\n".join(lines)
    for subject in ("P HTTP", "P gRPC", "P control", "D HTTP", "D gRPC", "D control", "protocol"):
        assert told.count(f" {subject}") == 1, told
    canary = re.search(r"canary P to D: (\d+) B of attention and (\d+) B of state.* GB/s", told)
    assert canary is not None, told
    assert int(canary[1]) > 0
    assert int(canary[2]) > 0
    assert lines[-1].endswith("the tokens equal those of D alone")


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_wrong_token_is_named_with_its_fix(
    served: ServedCluster, doctor: Doctor, token: str | None
) -> None:
    flags = () if token is None else ("--cluster-token", token)
    code, lines = doctor(served.p.url, served.d.url, *flags)
    assert code == 1
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert [line.split()[1:3] for line in wrong] == [
        ["P", "gRPC"],
        ["D", "gRPC"],
    ]
    assert all("; fix: give the doctor and all nodes the same" in line for line in wrong)


def test_a_wrong_api_key_stops_the_canary_only(served: ServedCluster, doctor: Doctor) -> None:
    code, lines = doctor(served.p.url, served.d.url, *KEYS[:2], "--api-key", "wrong")
    assert code == 1
    assert [line for line in lines if not line.startswith("ok ")] == lines[-1:]
    assert "P refuses the API key; fix: give the doctor the nodes' --api-key" in lines[-1]


def test_what_is_no_node_is_said_to_be_none(served: ServedCluster, doctor: Doctor) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        code, lines = doctor(f"http://127.0.0.1:{other.server_port}", served.d.url, *KEYS)
        other.shutdown()
    assert code == 1
    assert any("no Tandem node" in line and "not of a proxy" in line for line in lines), lines


def test_one_node_is_no_pair(served: ServedCluster, doctor: Doctor) -> None:
    code, lines = doctor(served.d.url, served.d.url, *KEYS)
    assert code == 1
    assert any("both URLs lead to one process" in line for line in lines), lines


async def test_a_stopped_node_is_not_reachable_and_the_other_is_still_looked_at(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    p, d = await cluster.pair(checkpoints["qwen3"])
    urls = p.url, d.url
    cluster.nodes.remove(p)
    await p.close()
    findings = await ask_doctor(*urls)
    wrong = only_wrong(findings)
    assert [one.subject for one in wrong] == [f"P HTTP {urls[0]}"]
    assert "not reachable" in wrong[0].text
    assert "--port" in wrong[0].fix
    assert [one.subject[:6] for one in findings if one not in wrong] == [
        "D HTTP",
        "D gRPC",
        "D cont",
    ]


@pytest.mark.parametrize(
    ("change", "key", "said", "fix"),
    [
        ({"dtype": "bfloat16"}, "layer 0", "'float32' on P and 'bfloat16' on D", "--dtype"),
        ({"prefix_hash_seed": "x"}, "prefix_hash_seed", " on P and ", "--prefix-hash-seed"),
        (
            {"kv_transfer_config": transfer_config("zmq")},
            "transport",
            "'shm' on P and 'zmq' on D",
            "transport",
        ),
    ],
    ids=["dtype", "hash seed", "transport"],
)
async def test_nodes_that_do_not_fit_are_told_apart_by_both_values(
    cluster: Cluster,
    checkpoints: dict[str, Path],
    change: dict[str, Any],
    key: str,
    *,
    said: str,
    fix: str,
) -> None:
    shm = transfer_config("shm")
    p = await cluster.start("prefill", checkpoints["qwen3"], kv_transfer_config=shm)
    d = await cluster.start("decode", checkpoints["qwen3"], **change)
    wrong = only_wrong(await ask_doctor(p.url, d.url))
    assert wrong
    for finding in wrong:
        assert finding.subject.startswith(key)
        assert said in finding.text
        assert fix in finding.fix


async def test_shm_between_two_hosts_and_a_loopback_address_are_wrong(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    reports = []
    for name, kind in (("P", "prefill"), ("D", "decode")):
        shm = transfer_config("shm")
        node = await cluster.start(kind, checkpoints["qwen3"], kv_transfer_config=shm)
        reports.append(await probe(name, HttpNode.of(node.url, 30.0), None))
    p, d = reports
    assert not only_wrong(compare(p, d))
    assert d.handshake is not None
    here = msgspec.msgpack.decode(d.handshake.transport_address, type=ShmAddress)
    there = msgspec.msgpack.encode(msgspec.structs.replace(here, host="another"))
    elsewhere = msgspec.structs.replace(d.handshake, transport_address=there)
    wrong = only_wrong(compare(p, dataclasses.replace(d, handshake=elsewhere)))
    assert [one.subject for one in wrong] == ["transport", "address of P"]
    assert "shm cannot work" in wrong[0].text
    assert '"auto"' in wrong[0].fix
    assert "127.0.0.1" in wrong[1].text
    assert "--advertise-host" in wrong[1].fix


async def test_a_hand_over_that_did_not_happen_is_wrong(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """P tells others an address at which it does not listen; D then computes by itself."""
    config = transfer_config(lease_s=1.0)
    p = await cluster.start("prefill", checkpoints["qwen3"], kv_transfer_config=config)
    d = await cluster.start("decode", checkpoints["qwen3"])
    advertise_wrongly(p)
    wrong = only_wrong(await ask_doctor(p.url, d.url))
    assert [one.subject for one in wrong] == ["canary P to D"]
    assert (
        "D computed the prompt itself instead of reading it from P at 127.0.0.1:1" in wrong[0].text
    )


def test_other_tokens_after_the_transfer_are_wrong() -> None:
    moved = KVTransferStats(
        attention_bytes=5_000_000, state_bytes=1_000_000, transfer_ms=2.0, verified=True
    )
    pulled, alone = reply([7, 8, 9], moved), reply([7, 8, 9], None)
    found = _judge({}, pulled, alone)
    assert (found.verdict, "3.000 GB/s" in found.text) == (Verdict.GOOD, True)
    unverified = reply([7, 8, 9], msgspec.structs.replace(moved, verified=False))
    found = _judge({}, unverified, alone)
    assert (found.verdict, "did not compare digests" in found.text) == (Verdict.WRONG, True)
    found = _judge({}, reply([7, 8, 8], moved), alone)
    assert (found.verdict, found.text[:16]) == (Verdict.WRONG, "tokens [7, 8, 8]")


def reply(tokens: list[int], moved: KVTransferStats | None) -> _Reply:
    told = {"choices": [{"token_ids": tokens}], "usage": {"kv_transfer": moved}}
    return msgspec.convert(told, _Reply)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8100", "grpc://h:1", "http://h", "http://h:x"])
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        HttpNode.of(url, 1.0)


def test_a_finding_is_one_line_whatever_it_quotes() -> None:
    finding = Finding(Verdict.WRONG, "a [bold]", "x\ny" * 100, "z")
    console = Console(highlight=False, soft_wrap=True, width=40)
    with console.capture() as capture:
        console.print(finding.line())
    assert capture.get().count("\n") == 1
    assert "a [bold]: x yx y" in capture.get()


def advertise_wrongly(p: NodeServer) -> None:
    p.connector.advertise(1)


async def ask_doctor(p_url: str, d_url: str) -> list[Finding]:
    nodes = HttpNode.of(p_url, 20.0), HttpNode.of(d_url, 20.0)
    return await asyncio.wait_for(examine(nodes, None, None, with_canary=True), 60)


def only_wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.WRONG]
