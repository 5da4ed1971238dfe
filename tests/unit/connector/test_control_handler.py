"""What P's control service makes of leases: generations keep readers of one request apart."""

import pytest

from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.lease_table import MAX_HOLD_S
from connector.pd.wire.messages import ANY_GENERATION
from engine.errors import KVTransferParamsError
from engine.request import unique_id
from tests.support.cache.leases import HOLDING, LEASE_S, identity, lease_table

REMOTE = ((0,), (4096, 8192))
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
    now = [0.0]
    leases = lease_table(LEASE_S, lambda: now[0])
    leases.grant("r", REMOTE, 64, holding=HOLDING)
    while not leases.renew([("r", ANY_GENERATION)]):
        now[0] += LEASE_S / 3
    assert now[0] == pytest.approx(LEASE_S + MAX_HOLD_S, abs=LEASE_S)
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
