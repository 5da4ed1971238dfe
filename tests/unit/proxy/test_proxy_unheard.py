"""The proxy gives up waiting for a prefill and releases it at P by its own request id."""

from connector.pd.prefill.control_handler import ControlHandler
from engine.request import unique_id
from tests.support.api.node_double import ScriptedNode, running_cluster, until
from tests.support.cache.leases import HOLDING, identity, lease_table

LEASE_S = 30.0


async def test_a_prefill_that_takes_too_long_is_released() -> None:
    p, d = ScriptedNode("p", "prefill", hang_at=0), ScriptedNode("d")
    async with running_cluster([p], [d], first_token_timeout=0.2) as client:
        await client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4)

        async def is_released() -> bool:
            return p.released == [(p.engine_id, p.requests[0].request_id, "abort")]

        await until(is_released)


def test_a_label_ends_the_leases_of_its_requests_and_confirms_none() -> None:
    leases = lease_table(LEASE_S, lambda: 0.0)
    control = ControlHandler("p", identity, leases, wake=lambda: None)
    mine, other = unique_id("cmpl-1", 10), unique_id("cmpl-12", 11)
    for request_id in (mine, other):
        leases.grant(request_id, ((0,),), 16, holding=HOLDING)
    assert not control.release("p", "cmpl-1", "abort", generation=0)
    assert leases.take_ended() == (mine,)
    assert control.release("p", other, "read", generation=0)
