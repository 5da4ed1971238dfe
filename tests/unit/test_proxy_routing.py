"""What each policy chooses, from plain snapshots."""

from engine.rpc.messages import NodeInfo
from engine.types import GenerateRequest
from proxy.cluster.node import NodeView
from proxy.routing.policies import POLICIES, LeastLoaded, RoundRobin

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(1,))


def node(name: str, *, queued: int = 0, in_flight: int = 0, usage: float = 0.0) -> NodeView:
    info = NodeInfo(
        engine_id=f"{name}-1",
        kind="decode",
        model_names=("tiny",),
        max_model_len=64,
        vocab_size=8,
        num_requests_waiting=queued,
        kv_cache_usage=usage,
    )
    return NodeView(name, info, num_in_flight=in_flight)


def test_round_robin_takes_each_node_in_turn() -> None:
    policy = RoundRobin()
    prefill, decode = [node("p1"), node("p2")], [node("d1"), node("d2"), node("d3")]
    routes = [policy.choose(REQUEST, prefill, decode) for _ in range(6)]
    assert [route.decode.name for route in routes] == ["d1", "d2", "d3"] * 2
    assert [route.prefill and route.prefill.name for route in routes] == ["p1", "p2"] * 3


def test_round_robin_does_not_count_turns_of_absent_prefill_nodes() -> None:
    policy = RoundRobin()
    decode = [node("d1")]
    assert policy.choose(REQUEST, [], decode).prefill is None
    route = policy.choose(REQUEST, [node("p1"), node("p2")], decode)
    assert route.prefill is not None
    assert route.prefill.name == "p1"


def test_least_loaded_counts_what_is_reported_and_what_is_in_flight() -> None:
    busy = [node("a", queued=3), node("b", in_flight=2), node("c", queued=1, in_flight=1)]
    route = LeastLoaded().choose(REQUEST, busy, list(reversed(busy)))
    assert route.prefill is not None
    assert (route.prefill.name, route.decode.name) == ("c", "c")


def test_least_loaded_breaks_ties_by_cache_usage() -> None:
    nodes = [node("full", usage=0.9), node("empty", usage=0.1)]
    assert LeastLoaded().choose(REQUEST, [], nodes).decode.name == "empty"


def test_every_policy_of_the_table_serves_without_prefill_nodes() -> None:
    for make in POLICIES.values():
        route = make().choose(REQUEST, [], [node("d")])
        assert (route.prefill, route.decode.name) == (None, "d")
