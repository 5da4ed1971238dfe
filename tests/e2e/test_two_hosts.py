"""P and D on two hosts: the hand-over crosses a cable, which is pulled out and plugged in again."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.asking import REMOTE_DECODE, question
from tests.pairs import arena_for, prompt_of
from tests.processes import ServerProcess
from tests.two_hosts import TwoHosts

FAMILY = "qwen3_5"
TRANSPORTS = ("nixl", "ucx", "zmq")
PROMPT, BLOCKER = list(prompt_of(100, salt=4)), list(prompt_of(100, salt=8))
TOKENS = 120
RECONNECT_S = 60.0


def transfers(transport: str, **extra: float) -> tuple[str, str]:
    """The flag that says how blocks move."""
    settings = {"transport": transport, **extra}
    return "--kv-transfer-config", json.dumps({"kv_connector_extra_config": settings})


def start(
    hosts: TwoHosts, model: Path, logs: Path, transport: str, *d_flags: str
) -> tuple[ServerProcess, ServerProcess]:
    """P and D, serving. What D does not hear within two seconds it does not wait for."""
    patience = {"control_timeout": 2.0, "transfer_timeout": 2.0}
    p = hosts.p.launch("prefill_node", model, logs / "p", *transfers(transport, **patience))
    short = transfers(transport, kv_lease_duration=2.0, **patience)
    d = hosts.d.launch("decode_node", model, logs / "d", *short, *d_flags)
    return p.wait_until_serving(), d.wait_until_serving()


def prefill(hosts: TwoHosts, p: ServerProcess, prompt: list[int]) -> dict[str, Any]:
    """P's part; the request for D."""
    asked = question(prompt, kv_transfer_params=REMOTE_DECODE, max_tokens=1)
    params = hosts.p.ask(p, asked)["kv_transfer_params"]
    return question(prompt, kv_transfer_params=params)


def tokens_and_bytes(answer: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens, and how many bytes were pulled for them."""
    moved = answer["usage"].get("kv_transfer") or {}
    pulled = moved.get("attention_bytes", 0) + moved.get("state_bytes", 0)
    return answer["choices"][0]["token_ids"], pulled


def hand_over_again(hosts: TwoHosts, p: ServerProcess, d: ServerProcess, alone: list[int]) -> None:
    """Connections come back, at the latest when their back-off is over; tokens are right always."""
    deadline = time.monotonic() + RECONNECT_S
    pulled = 0
    while not pulled:
        assert time.monotonic() < deadline, "the cable is back, but hand-overs are not"
        tokens, pulled = tokens_and_bytes(hosts.d.ask(d, prefill(hosts, p, PROMPT)))
        assert tokens == alone


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_hand_over_crosses_the_cable(
    two_hosts: TwoHosts, checkpoints: dict[str, Path], tmp_path: Path, transport: str
) -> None:
    p, d = start(two_hosts, checkpoints[FAMILY], tmp_path, transport)
    alone, _ = tokens_and_bytes(two_hosts.d.ask(d, question(PROMPT)))
    tokens, pulled = tokens_and_bytes(two_hosts.d.ask(d, prefill(two_hosts, p, PROMPT)))
    assert tokens == alone
    assert pulled > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pulled_cable_costs_a_recompute_and_no_token(
    two_hosts: TwoHosts, checkpoints: dict[str, Path], tmp_path: Path, transport: str
) -> None:
    p, d = start(two_hosts, checkpoints[FAMILY], tmp_path, transport)
    alone, _ = tokens_and_bytes(two_hosts.d.ask(d, question(PROMPT)))
    assert tokens_and_bytes(two_hosts.d.ask(d, prefill(two_hosts, p, BLOCKER)))[1] > 0
    asked = prefill(two_hosts, p, PROMPT)
    two_hosts.set_link("down")
    assert tokens_and_bytes(two_hosts.d.ask(d, asked)) == (alone, 0)
    two_hosts.set_link("up")
    hand_over_again(two_hosts, p, d, alone)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cable_pulled_behind_the_claim_costs_a_recompute_and_no_token(
    two_hosts: TwoHosts, checkpoints: dict[str, Path], tmp_path: Path, transport: str
) -> None:
    """D has claimed the prefill and waits for room, which a lease of two seconds takes up."""
    arena = ("--kv-cache-memory-bytes", str(arena_for(checkpoints[FAMILY], TOKENS)))
    p, d = start(two_hosts, checkpoints[FAMILY], tmp_path, transport, *arena)
    alone, _ = tokens_and_bytes(two_hosts.d.ask(d, question(PROMPT)))
    asked = prefill(two_hosts, p, PROMPT)
    two_hosts.d.ask(d, question(BLOCKER, kv_transfer_params=REMOTE_DECODE, max_tokens=1))
    answer = two_hosts.d.begin(d, asked)
    two_hosts.d.wait_for(d, "vllm:num_requests_waiting", 1)
    two_hosts.set_link("down")
    assert tokens_and_bytes(answer.result()) == (alone, 0)
    two_hosts.set_link("up")
    hand_over_again(two_hosts, p, d, alone)
