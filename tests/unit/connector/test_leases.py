"""Leases on P: generations keep readers of one request apart, and spare leases go first.

A spare lease is for a next turn that may never come: it lasts longer, and goes first when memory is
short. A claimed one is like any other, and is never taken back.
"""

import pytest

from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.lease_table import MAX_HOLD_S, LeaseTable
from connector.pd.wire.messages import ANY_GENERATION
from engine.errors import KVTransferParamsError
from engine.request import unique_id
from tests.support.cache.leases import HOLDING, LEASE_S, identity, lease_table
from tests.support.nodes.clock import Clock

REMOTE = ((0,), (4096, 8192))
TTL_S = 480.0
OFFSETS = ((0,),)
IDENTITY = identity()


def test_a_reader_of_an_old_generation_hears_that_its_lease_is_gone_and_ends_nothing() -> None:
    leases = lease_table(LEASE_S, lambda: 0.0)
    handler = ControlHandler(IDENTITY.engine_id, lambda *_: IDENTITY, leases, wake=lambda: None)
    leases.grant("r", REMOTE, 64, holding=HOLDING)
    old = handler.claim("p", "r").generation
    leases.grant("r", REMOTE, 64, holding=HOLDING)
    new = handler.claim("p", "r").generation
    assert old != new
    assert handler.renew("p", ["r", "r"], [old, new]) == ["r"]
    assert not handler.release("p", "r", "read", generation=old)
    assert leases.take_ended() == ()
    assert handler.release("p", "r", "read", generation=new)
    assert leases.take_ended() == ("r",)


def test_generations_go_on_when_a_request_id_comes_again() -> None:
    leases = lease_table(LEASE_S, lambda: 0.0)
    seen = []
    for _ in range(3):
        leases.grant("r", REMOTE, 64, holding=HOLDING)
        lease = leases.claim("r")
        assert lease is not None
        seen.append(lease.generation)
        assert leases.release("r", lease.generation)
    assert seen == sorted(set(seen))


def test_renewals_name_a_generation_each() -> None:
    handler = ControlHandler(
        IDENTITY.engine_id,
        lambda *_: IDENTITY,
        lease_table(LEASE_S, lambda: 0.0),
        wake=lambda: None,
    )
    with pytest.raises(KVTransferParamsError, match="1 generations given for 2 requests"):
        handler.renew("p", ["a", "b"], [1])


def test_no_renewal_keeps_a_lease_for_ever() -> None:
    clock = Clock()
    leases = lease_table(LEASE_S, clock)
    leases.grant("r", REMOTE, 64, holding=HOLDING)
    while not leases.renew([("r", ANY_GENERATION)]):
        clock.now += LEASE_S / 3
    assert clock.now == pytest.approx(LEASE_S + MAX_HOLD_S, abs=LEASE_S)
    assert leases.take_ended() == ("r",)


def test_a_label_ends_the_leases_of_its_requests_and_confirms_none() -> None:
    """`cmpl-1` is no beginning of `cmpl-12`; what is said twice, or of nothing, ends nothing."""
    leases = lease_table(LEASE_S, lambda: 0.0)
    control = ControlHandler("p", lambda *_: IDENTITY, leases, wake=lambda: None)
    mine, other = unique_id("cmpl-1", 10), unique_id("cmpl-12", 11)
    for request_id in (mine, other):
        leases.grant(request_id, ((0,),), 16, holding=HOLDING)
    for name in ("", "cmpl", "cmpl-", "unknown", f"{other}\n", "r" * 10_000):
        assert not control.release("p", name, "abort", generation=0)
        assert leases.take_ended() == (), name
    assert not control.release("p", "cmpl-1", "abort", generation=0)
    assert leases.take_ended() == (mine,)
    assert control.release("p", other, "read", generation=0)
    assert leases.take_ended() == (other,)
    assert not control.release("p", other, "read", generation=0)


# --- spare leases --------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def leases(clock: Clock) -> LeaseTable:
    """One for a decode, and three for a next turn, five seconds apart."""
    table = lease_table(LEASE_S, clock)
    table.grant("prefill", OFFSETS, 16, holding=HOLDING)
    for name in ("first", "second", "third"):
        table.grant(name, OFFSETS, 16, holding=HOLDING, spare_s=TTL_S)
        clock.now += 5.0
    return table


def test_a_spare_lease_lasts_its_own_time(leases: LeaseTable, clock: Clock) -> None:
    clock.now = 100.0 + TTL_S - 0.5
    assert leases.take_ended() == ("prefill",)
    clock.now += 1.0
    assert leases.take_ended() == ("first",)
    assert leases.num_expired == 2
    assert leases.claim("first") is None


def test_a_claimed_one_lasts_as_long_as_its_reader_renews_it(
    leases: LeaseTable, clock: Clock
) -> None:
    lease = leases.claim("third")
    assert lease is not None and lease.num_tokens == 16
    clock.now += LEASE_S - 1.0
    assert leases.renew([("third", lease.generation)]) == []
    clock.now += LEASE_S / 2
    assert leases.held("third", lease.generation) is lease
    clock.now += LEASE_S
    assert "third" in leases.take_ended()


def test_a_claim_never_makes_a_lease_shorter_than_its_reader_s_pace(clock: Clock) -> None:
    table = lease_table(LEASE_S, clock)
    table.grant("r", OFFSETS, 16, holding=HOLDING, spare_s=1.0)
    lease = table.claim("r")
    assert lease is not None
    clock.now += LEASE_S / 2
    assert table.renew([("r", lease.generation)]) == []


def test_the_oldest_that_nobody_has_claimed_goes_first(leases: LeaseTable) -> None:
    claimed = leases.claim("first")
    assert claimed is not None
    assert [leases.take_back() for _ in range(3)] == ["second", "third", None]
    assert leases.num_taken_back == 2
    assert leases.take_ended() == (), "its owner frees it, once"
    assert leases.claim("second") is None
    assert leases.release("first", claimed.generation)
    assert leases.release("prefill")


def test_one_that_has_ended_is_not_taken_back_as_well(leases: LeaseTable) -> None:
    leases.release("first")
    assert leases.take_back() == "second"
    assert leases.take_ended() == ("first",)
