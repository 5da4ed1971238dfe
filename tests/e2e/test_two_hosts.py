"""P and D on two hosts, and what joins them pulled out: before D knows, behind that, mid-pull."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network.two_hosts import HandOvers, transfers, two_hosts
from tests.support.nodes.asking import REMOTE_DECODE, question
from tests.support.nodes.pairs import arena_for, prompt_of
from tests.tiers import everyday

PROMPT, BLOCKER = list(prompt_of(100, salt=4)), list(prompt_of(100, salt=8))
TOKENS = 120
# What D does not hear within two seconds it does not wait for.
PATIENCE = {"control_timeout": 2.0, "transfer_timeout": 2.0, "kv_lease_duration": 2.0}


@pytest.fixture(scope="module", params=everyday(("nixl", "ucx", "zmq"), ("nixl",)))
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HandOvers]:
    """One pair of nodes for all tests of a transport; D has room for one request."""
    arena = ("--kv-cache-memory-bytes", str(arena_for(model, TOKENS)))
    with two_hosts() as hosts:
        logs, config = tmp_path_factory.mktemp("logs"), transfers(request.param, **PATIENCE)
        yield HandOvers.between(hosts, model, logs, config=config, d_flags=arena)


@pytest.fixture
def pair(served: HandOvers) -> Iterator[HandOvers]:
    """Hand-overs work when a test begins and when it ends, and nothing stays."""
    served.until_they_work(PROMPT)
    yield served
    served.hosts.mend()
    served.until_they_work(PROMPT)
    served.hosts.assert_at_rest()


def test_a_pulled_cable_costs_a_recompute_and_no_token(pair: HandOvers) -> None:
    """D knows P and reads at once."""
    asked = pair.prefill(PROMPT)
    pair.hosts.set_link("down")
    assert pair.finish(asked) == (pair.alone(PROMPT), 0)


def test_a_cable_pulled_behind_admission_costs_a_recompute_and_no_token(pair: HandOvers) -> None:
    """D has admitted the request and waits for room, which a lease of two seconds takes up."""
    alone = pair.alone(PROMPT)
    asked = pair.prefill(PROMPT)
    hosts = pair.hosts
    hosts.d.ask(pair.d, question(BLOCKER, kv_transfer_params=REMOTE_DECODE, max_tokens=1))
    answer = hosts.d.begin(pair.d, asked)
    hosts.d.do(pair.d.wait_for, "vllm:num_requests_waiting", 1)
    hosts.set_link("down")
    assert pair.read(answer.result()) == (alone, 0)


def test_a_cable_pulled_mid_pull_costs_a_recompute_and_no_token(pair: HandOvers) -> None:
    alone = pair.alone(PROMPT)
    asked = pair.prefill(PROMPT)
    answer = pair.begin_and_hold(asked)
    pair.hosts.set_link("down")
    pair.hosts.relay.go_on()
    assert pair.read(answer.result()) == (alone, 0)
