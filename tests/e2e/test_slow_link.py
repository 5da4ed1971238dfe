"""P and D far apart: what joins them delays unevenly, loses frames, and stops in mid-pull."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network.two_hosts import HandOvers, transfers, two_hosts
from tests.support.nodes.asking import REMOTE_DECODE, question
from tests.support.nodes.pairs import arena_for, prompt_of
from tests.tiers import everyday

PROMPT, BLOCKER = list(prompt_of(100, salt=4)), list(prompt_of(100, salt=8))
TOKENS = 120
DELAY_S, JITTER_S = 0.020, 0.015
LOSS = 0.05
MANY = 20
LEASE_S = 4.0
PAUSE_S = 1.5
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module", params=everyday(("nixl", "ucx", "zmq"), ("zmq",)))
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HandOvers]:
    """One pair of nodes for all tests of a transport; D has room for one request."""
    arena = ("--kv-cache-memory-bytes", str(arena_for(model, TOKENS)))
    with two_hosts() as hosts:
        config = transfers(request.param, kv_lease_duration=LEASE_S)
        pair = HandOvers.between(
            hosts, model, tmp_path_factory.mktemp("logs"), config=config, d_flags=arena
        )
        pair.until_they_work(PROMPT)
        hosts.remember_start_values()
        yield pair


@pytest.fixture
def pair(served: HandOvers) -> Iterator[HandOvers]:
    """Far apart in the test; nothing stays."""
    served.hosts.relay.be_far(DELAY_S, JITTER_S)
    yield served
    served.hosts.mend()
    served.hosts.assert_at_rest()


def assert_pulled(pair: HandOvers, found: tuple[list[int], int], alone: list[int]) -> None:
    """The tokens of D alone, and none of them computed again."""
    tokens, pulled = found
    assert tokens == alone
    assert pulled > 0, pair.d.said


def round_trip_s(pair: HandOvers) -> float:
    """From D to P and back: no machine is slow enough to make less of it than the relay does."""
    began = time.monotonic()
    hosts = pair.hosts
    hosts.d.do(socket.create_connection, (hosts.p.address, pair.p.port)).close()
    return time.monotonic() - began


@pytest.mark.parametrize("changes", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_delay_and_jitter_change_no_token(pair: HandOvers, changes: dict[str, object]) -> None:
    assert round_trip_s(pair) >= 2 * (DELAY_S - JITTER_S)
    alone = pair.alone(PROMPT, **changes)
    for _ in range(2):
        assert_pulled(pair, pair.finish(pair.prefill(PROMPT, **changes)), alone)


def test_lost_frames_change_no_token(pair: HandOvers) -> None:
    alone = pair.alone(PROMPT)
    lost = pair.hosts.relay.count_lost()
    pair.hosts.relay.lose(LOSS)
    for _ in range(MANY):
        assert_pulled(pair, pair.finish(pair.prefill(PROMPT)), alone)
        if pair.hosts.relay.count_lost() > lost:
            return
    raise AssertionError("nothing was lost")


def test_a_pause_in_mid_pull_costs_no_pull(pair: HandOvers) -> None:
    alone = pair.alone(PROMPT)
    answer = pair.begin_and_hold(pair.prefill(PROMPT))
    time.sleep(PAUSE_S)
    pair.hosts.relay.go_on()
    assert_pulled(pair, pair.read(answer.result()), alone)


def test_a_cable_that_is_out_for_a_moment_costs_no_pull(pair: HandOvers) -> None:
    alone = pair.alone(PROMPT)
    answer = pair.begin_and_hold(pair.prefill(PROMPT))
    pair.hosts.set_link("down")
    pair.hosts.relay.go_on()
    time.sleep(0.3)
    pair.hosts.set_link("up")
    assert_pulled(pair, pair.read(answer.result()), alone)


@pytest.mark.parametrize("served", ["zmq"], indirect=True)
def test_a_lease_is_renewed_from_afar(pair: HandOvers) -> None:
    """D has claimed the prefill and has no room for it until its own lease for another ends."""
    alone = pair.alone(PROMPT)
    hosts = pair.hosts
    asked = pair.prefill(PROMPT)
    blocked = question(BLOCKER, kv_transfer_params=REMOTE_DECODE, max_tokens=1)
    hosts.d.ask(pair.d, blocked)
    answer = hosts.d.begin(pair.d, asked)
    hosts.d.do(pair.d.wait_for, "vllm:num_requests_waiting", 1)
    assert_pulled(pair, pair.read(answer.result()), alone)
