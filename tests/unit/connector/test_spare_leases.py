"""Leases for a next turn that may never come: they last longer, and go first when memory is short.

A claimed one is like any other, and is never taken back.
"""

import pytest

from connector.pd.prefill.lease_table import LeaseTable
from tests.support.cache.leases import HOLDING, lease_table
from tests.support.nodes.clock import Clock

LEASE_S = 30.0
TTL_S = 480.0
OFFSETS = ((0,),)


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
