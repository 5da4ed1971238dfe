"""P and D on two hosts: what joins them delays, loses frames, stops, or is pulled out."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.network.two_hosts import HandOvers, TwoHosts, transfers
from tests.support.nodes.asking import REMOTE_DECODE, question
from tests.support.nodes.pairs import prompt_of
from tests.tiers import everyday

PROMPT, BLOCKER = list(prompt_of(100, salt=4)), list(prompt_of(100, salt=8))
DELAY_S, JITTER_S = 0.020, 0.015
LOSS = 0.05
MANY = 20
LEASE_S = 4.0
# What D does not hear within two seconds it does not wait for.
PATIENCE = {"control_timeout": 2.0, "transfer_timeout": 2.0, "kv_lease_duration": 2.0}
PAUSE_S = 1.5
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
LogFolders = pytest.TempPathFactory


@pytest.fixture(scope="module", params=everyday(("nixl", "ucx", "zmq"), ("zmq",)))
def far_pair(
    request: pytest.FixtureRequest, hosts: TwoHosts, model: Path, tmp_path_factory: LogFolders
) -> Iterator[HandOvers]:
    """One pair of nodes for all tests of a transport."""
    config = transfers(request.param, kv_lease_duration=LEASE_S)
    pair = HandOvers.between(hosts, model, tmp_path_factory.mktemp("logs"), config)
    pair.until_they_work(PROMPT)
    hosts.remember_start_values()
    yield pair


@pytest.fixture
def pair(far_pair: HandOvers) -> Iterator[HandOvers]:
    """Far apart in the test; nothing stays."""
    far_pair.hosts.relay.be_far(DELAY_S, JITTER_S)
    yield far_pair
    far_pair.hosts.mend()
    far_pair.hosts.assert_at_rest()


@pytest.fixture(scope="module", params=everyday(("nixl", "ucx", "zmq"), ("nixl",)))
def impatient_pair(
    request: pytest.FixtureRequest, hosts: TwoHosts, model: Path, tmp_path_factory: LogFolders
) -> Iterator[HandOvers]:
    """One whose D waits two seconds for what it does not hear."""
    config = transfers(request.param, **PATIENCE)
    yield HandOvers.between(hosts, model, tmp_path_factory.mktemp("logs"), config)


@pytest.fixture
def impatient(impatient_pair: HandOvers) -> Iterator[HandOvers]:
    """Hand-overs work when a test begins and when it ends, and nothing stays."""
    impatient_pair.until_they_work(PROMPT)
    yield impatient_pair
    impatient_pair.hosts.mend()
    impatient_pair.until_they_work(PROMPT)
    impatient_pair.hosts.assert_at_rest()


def begin_without_room(pair: HandOvers, asked: dict[str, Any]) -> Future[dict[str, Any]]:
    """D has claimed the prefill, and has no room for it until its own lease for another ends."""
    blocked = question(BLOCKER, kv_transfer_params=REMOTE_DECODE, max_tokens=1)
    pair.hosts.d.ask(pair.d, blocked)
    answer = pair.hosts.d.begin(pair.d, asked)
    pair.hosts.d.do(pair.d.wait_for, "vllm:num_requests_waiting", 1)
    return answer


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


@pytest.mark.parametrize("far_pair", ["zmq"], indirect=True)
def test_a_lease_is_renewed_from_afar(pair: HandOvers) -> None:
    alone = pair.alone(PROMPT)
    answer = begin_without_room(pair, pair.prefill(PROMPT))
    assert_pulled(pair, pair.read(answer.result()), alone)


def test_a_pulled_cable_costs_a_recompute_and_no_token(impatient: HandOvers) -> None:
    """D knows P and reads at once."""
    asked = impatient.prefill(PROMPT)
    impatient.hosts.set_link("down")
    assert impatient.finish(asked) == (impatient.alone(PROMPT), 0)


def test_a_cable_pulled_after_admission_costs_a_recompute_and_no_token(
    impatient: HandOvers,
) -> None:
    """D has admitted the request and waits for room, which a lease of two seconds takes up."""
    alone = impatient.alone(PROMPT)
    asked = impatient.prefill(PROMPT)
    answer = begin_without_room(impatient, asked)
    impatient.hosts.set_link("down")
    assert impatient.read(answer.result()) == (alone, 0)


def test_a_cable_pulled_mid_pull_costs_a_recompute_and_no_token(impatient: HandOvers) -> None:
    alone = impatient.alone(PROMPT)
    asked = impatient.prefill(PROMPT)
    answer = impatient.begin_and_hold(asked)
    impatient.hosts.set_link("down")
    impatient.hosts.relay.go_on()
    assert impatient.read(answer.result()) == (alone, 0)
