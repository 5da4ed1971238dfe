"""What estimates may decide: prefixes and machines that differ, not noise."""

from collections import Counter

import pytest

from proxy.routing.policies import PrefixAware
from proxy.routing.prompt import NodeHit
from tests.support.api.routed_prompts import EVENTS, names, node, prompt, with_events


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
