"""Choices of each routing policy, from plain snapshots of nodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from proxy.cluster.node import NodeView
from proxy.routing.local_prefill import LocalPrefill
from proxy.routing.policies import (
    POLICIES,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    Route,
    RoutingPolicy,
    Session,
)
from proxy.routing.prompt import NodeHit, RoutedPrompt
from tests.support.api.routed_prompts import EVENTS, names, node, prompt, with_events


def test_round_robin_takes_each_node_in_turn() -> None:
    policy = RoundRobin()
    prefill, decode = [node("p1"), node("p2")], [node("d1"), node("d2"), node("d3")]
    routes = [policy.choose(prompt(), prefill, decode) for _ in range(6)]
    assert [route.decode.name for route in routes] == ["d1", "d2", "d3"] * 2
    assert [route.prefill and route.prefill.name for route in routes] == ["p1", "p2"] * 3


def test_round_robin_does_not_count_turns_of_absent_prefill_nodes() -> None:
    policy = RoundRobin()
    decode = [node("d1")]
    assert policy.choose(prompt(), [], decode).prefill is None
    assert names(policy.choose(prompt(), [node("p1"), node("p2")], decode)) == ("p1", "d1")


def test_round_robin_moves_on_where_a_pair_was_chosen_twice() -> None:
    """As when hand-overs from p1 to d1 fail: P is chosen again for that D alone."""
    policy, p, d = RoundRobin(), [node("p1"), node("p2")], [node("d1"), node("d2")]
    taken = []
    for _ in range(8):
        route = policy.choose(prompt(), p, d)
        if names(route) == ("p1", "d1"):
            route = policy.choose(prompt(), p[1:], [route.decode])
        taken.append(names(route))
    assert Counter(decode for _, decode in taken) == {"d1": 4, "d2": 4}
    assert ("p1", "d1") not in taken


def test_least_loaded_counts_what_is_reported_and_what_is_in_flight() -> None:
    busy = [node("a", queued=3), node("b", in_flight=2), node("c", queued=1, in_flight=1)]
    assert names(LeastLoaded().choose(prompt(), busy, list(reversed(busy)))) == ("c", "c")


def test_least_loaded_breaks_ties_by_cache_usage() -> None:
    nodes = [node("full", usage=0.9), node("empty", usage=0.1)]
    assert LeastLoaded().choose(prompt(), [], nodes).decode.name == "empty"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_of_the_table_serves_without_prefill_nodes(policy: str) -> None:
    assert names(POLICIES[policy]().choose(prompt(), [], [node("d")])) == (None, "d")


# --- session -----------------------------------------------------------------------------------


def test_a_session_stays_on_its_nodes_while_they_are_there() -> None:
    prefill, decode = [node(f"p{i}") for i in range(5)], [node(f"d{i}") for i in range(7)]
    first = {f"s{i}": Session().choose(prompt(session=f"s{i}"), prefill, decode) for i in range(99)}
    assert {names(route)[1] for route in first.values()} == {it.name for it in decode}
    for session, route in first.items():
        # Another proxy, which lists and loads them otherwise, and lacks a node that is not its.
        others = [node(it.name, queued=9) for it in reversed(decode) if it != decode[3]]
        again = Session().choose(prompt(session=session), prefill[::-1], others)
        assert again.prefill == route.prefill
        if route.decode != decode[3]:
            assert again.decode.name == route.decode.name


def test_a_session_returns_to_its_nodes_when_they_return() -> None:
    nodes = [node(f"d{i}") for i in range(5)]
    asked = prompt(session="s")
    before = Session().choose(asked, nodes, nodes)
    others = [it for it in nodes if it.name != before.decode.name]
    meanwhile = Session().choose(asked, others, others)
    # Restarted: another incarnation at the same address.
    back = [
        replace(it, info=msgspec.structs.replace(it.info, engine_id=f"{it.name}-2")) for it in nodes
    ]
    assert names(meanwhile)[1] != names(before)[1]
    assert names(Session().choose(asked, back, back)) == names(before)


def test_without_a_session_it_is_the_least_loaded() -> None:
    assert names(Session().choose(prompt(), [], [node("a", queued=1), node("b")])) == (None, "b")


# --- prefix_aware ------------------------------------------------------------------------------


def test_p_is_where_states_are_and_d_where_attention_is() -> None:
    hits = {"p1": NodeHit(992, 0), "p2": NodeHit(800, 800), "d1": NodeHit(), "d2": NodeHit(512)}
    asked = prompt(range(1000), hits)
    route = PrefixAware().choose(asked, with_events("p1", "p2"), with_events("d1", "d2"))
    assert names(route) == ("p2", "d2")
    assert (route.reason, route.prefill_hit.resumable, route.decode_hit.attention) == (
        "prefix",
        800,
        512,
    )


def test_attention_without_a_state_draws_half_as_much() -> None:
    p = with_events("a", "b")
    choose = PrefixAware().choose
    both = {"a": NodeHit(800, 0), "b": NodeHit(300, 300)}
    assert names(choose(prompt(range(1000), both), p, [node("d")]))[0] == "a"
    both = {"a": NodeHit(800, 0), "b": NodeHit(500, 500)}
    assert names(choose(prompt(range(1000), both), p, [node("d")]))[0] == "b"


def test_slower_tiers_count_less() -> None:
    hits = {"a": NodeHit(600, 600, 300.0, 300.0), "b": NodeHit(400, 400)}
    asked = prompt(range(1000), hits)
    assert names(PrefixAware().choose(asked, with_events("a", "b"), [node("d")]))[0] == "b"


def test_a_queue_outweighs_a_hit() -> None:
    asked = prompt(range(1000), {"p1": NodeHit(900, 900)})
    short, long = node("p1", tokens=800, events=EVENTS), node("p1", tokens=1000, events=EVENTS)
    other = with_events("p2")
    assert names(PrefixAware().choose(asked, [short, *other], [node("d")]))[0] == "p1"
    assert names(PrefixAware().choose(asked, [long, *other], [node("d")]))[0] == "p2"


def test_measured_rates_count_and_others_stand_in_for_missing_ones() -> None:
    fast = node("fast", tokens=3000, events=EVENTS, prefill_tokens_per_s=10_000.0)
    slow = node("slow", events=EVENTS, prefill_tokens_per_s=1_000.0)
    assert names(PrefixAware().choose(prompt(range(1000)), [slow, fast], [node("d")]))[0] == "fast"
    new = node("new", tokens=500, events=EVENTS)  # as fast as the others are in the mean
    chosen = PrefixAware().choose(prompt(range(1000)), [slow, fast, new], [node("d")])
    assert names(chosen)[0] == "new"


def test_nodes_without_events_are_chosen_by_load() -> None:
    p, d = [node("p1", queued=2), node("p2")], [node("d1", queued=1), node("d2")]
    for _ in range(3):
        route = PrefixAware().choose(prompt(range(99)), p, d)
        by_load = LeastLoaded().choose(prompt(range(99)), p, d)
        assert route == replace(by_load, reason="no_events")


def test_unknown_prompts_spread_over_idle_nodes() -> None:
    policy, p, d = PrefixAware(), with_events("p1", "p2", "p3"), with_events("d1", "d2")
    routes = [policy.choose(prompt(range(99)), p, d) for _ in range(6)]
    assert Counter(names(it)[0] for it in routes) == {"p1": 2, "p2": 2, "p3": 2}
    assert Counter(names(it)[1] for it in routes) == {"d1": 3, "d2": 3}
    assert {it.reason for it in routes} == {"load"}


def replay(
    policy: RoutingPolicy, prompts: Sequence[RoutedPrompt], nodes: Sequence[NodeView]
) -> Counter[str]:
    """How many prompts each P gets of a stream that the nodes just manage to compute."""
    queues = {it.name: 0 for it in nodes}
    gets: Counter[str] = Counter()
    for asked in prompts:
        views = [node(name, tokens=queue, events=EVENTS) for name, queue in queues.items()]
        chosen = policy.choose(asked, views, [node("d")]).prefill
        assert chosen is not None
        gets[chosen.name] += 1
        queues[chosen.name] += asked.num_tokens - asked.hit(chosen.name).resumable
        for name in queues:
            queues[name] = max(0, queues[name] - asked.num_tokens // len(nodes))
    return gets


def test_a_block_that_all_prompts_share_does_not_draw_them_to_one_node() -> None:
    nodes = with_events("a", "b", "c", "d")
    shared = {"a": NodeHit(512, 512)}
    prompts = [prompt(range(6000 + i), shared) for i in range(80)]
    gets = replay(PrefixAware(), prompts, nodes)
    assert max(gets.values()) <= 25, gets
    assert min(gets.values()) >= 15, gets


def test_a_prompt_that_all_share_stays_where_it_is_until_a_queue_forms() -> None:
    nodes = with_events("a", "b", "c", "d")
    prompts = [prompt(range(6000), {"a": NodeHit(5984, 5984)}) for _ in range(40)]
    assert replay(PrefixAware(), prompts, nodes) == {"a": 40}


# --- conditional disaggregation ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "cached", "is_local"),
    [(0, 990, False), (100, 0, False), (100, 899, False), (100, 901, True), (2000, 0, True)],
)
def test_prompts_of_which_d_must_compute_little_stay_there(
    threshold: int, cached: int, is_local: bool
) -> None:
    hit = NodeHit(cached, cached)
    route = Route(node("p"), node("d"), "load", decode_hit=hit)
    applied = LocalPrefill(threshold).applied(prompt(range(1000)), route)
    assert (applied.prefill is None) == is_local
    assert (applied.reason == "below_threshold") == is_local


def test_attention_without_a_state_spares_d_no_computing() -> None:
    route = Route(node("p"), node("d"), "load", decode_hit=NodeHit(990, 0))
    assert LocalPrefill(100).applied(prompt(range(1000)), route) is route
    # By the line alone: a link so slow that all attention counts, and a D as fast as P.
    slow_d = node("d", prefill_tokens_per_s=500.0)
    route = replace(route, decode=slow_d, prefill=node("p", prefill_tokens_per_s=500.0))
    assert LocalPrefill("auto").applied(prompt(range(1000)), route) is route


@pytest.mark.parametrize(
    ("rates", "is_local"),
    [
        ({"link_bytes_per_s": 1e10, "kv_bytes_per_token": 1000}, False),
        ({"link_bytes_per_s": 1e7, "kv_bytes_per_token": 100_000}, True),
        ({"state_bytes": 10**9, "link_bytes_per_s": 1e9}, True),
        ({"link_bytes_per_s": 1e7, "prefill_tokens_per_s": 10.0}, False),
    ],
)
def test_auto_compares_measured_lines(rates: dict[str, float], is_local: bool) -> None:
    measured: dict[str, Any] = {"prefill_tokens_per_s": 1000.0, **rates}
    route = Route(node("p", prefill_tokens_per_s=1000.0), node("d", **measured), "load")
    assert (LocalPrefill("auto").applied(prompt(range(1000)), route).prefill is None) == is_local


def test_auto_sends_long_prompts_to_p_before_anything_was_measured() -> None:
    def applied(num_tokens: int, **of_d: Any) -> Route:
        route = Route(node("p"), node("d", **of_d), "load")
        return LocalPrefill("auto").applied(prompt(range(num_tokens)), route)

    assert applied(1000).prefill is not None
    assert applied(4).reason == "sooner_on_d"
    # A P that has computed nothing is as fast as the D that has, or it would never be tried.
    assert applied(1000, prefill_tokens_per_s=20_000.0).prefill is not None
    assert applied(1000, prefill_tokens_per_s=50.0).prefill is not None


def test_rates_that_differ_by_noise_draw_nothing_to_one_node() -> None:
    p = [
        node("a", events=EVENTS, prefill_tokens_per_s=2000.0),
        node("b", events=EVENTS, prefill_tokens_per_s=4000.0),
    ]
    policy = PrefixAware()
    gets = Counter(names(policy.choose(prompt(range(99)), p, [node("d")]))[0] for _ in range(8))
    assert gets == {"a": 4, "b": 4}


def test_links_are_compared_only_where_they_differ_by_far() -> None:
    """One D has measured small pulls, which tell the latency more than the line."""
    rates = {"small": 1e8, "large": 6e8}
    d = [node(name, events=EVENTS, link_bytes_per_s=rate) for name, rate in rates.items()]
    policy, p = PrefixAware(), with_events("p")
    gets = Counter(names(policy.choose(prompt(range(99)), p, d))[1] for _ in range(8))
    assert gets == {"small": 4, "large": 4}
    far = node("far", events=EVENTS, link_bytes_per_s=1e6)
    assert names(PrefixAware().choose(prompt(range(99)), p, [far, *d]))[1] != "far"


@pytest.mark.parametrize(("num_requests", "chosen"), [(1, "d1"), (8, "d1"), (12, "d2")])
def test_a_few_requests_on_d_do_not_outweigh_a_hit_and_many_do(
    num_requests: int, chosen: str
) -> None:
    d = [node("d1", in_flight=num_requests, events=EVENTS), *with_events("d2")]
    asked = prompt(range(1000), {"d1": NodeHit(900)})
    assert names(PrefixAware().choose(asked, with_events("p"), d))[1] == chosen
