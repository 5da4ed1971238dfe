"""Conditional disaggregation: which prompts a decode node computes itself, though P is there.

A hand-over has its price: states to move, and a second node to ask. A prompt that is short, or that
D has in its cache, is sooner done on D.
"""

from dataclasses import replace
from typing import Final, Literal

from proxy.routing.cost import Rates
from proxy.routing.policies import Route
from proxy.routing.prompt import NO_HIT, NodeHit, RoutedPrompt

Threshold = int | Literal["auto"]
HAND_OVER_S: Final = 0.005
"""Time of a hand-over beside P's computing and the bytes."""
INTERFERENCE: Final = 2.0
"""A prefill on D also delays the answers that D makes, so its time counts so many times."""


class LocalPrefill:
    """`threshold`: uncached tokens on D below which D prefills; 0: never; "auto": when sooner."""

    def __init__(self, threshold: Threshold) -> None:
        self._threshold = threshold

    def applied(self, prompt: RoutedPrompt, route: Route) -> Route:
        """`route`, or the same D without P."""
        if route.prefill is None or not self._threshold:
            return route
        p, d, num_tokens = route.prefill, route.decode, prompt.num_tokens
        if self._threshold == "auto":
            rates = Rates((p,), (d,))
            on_p = rates.queue_s(p) + rates.prefill_s(p, _sure(route.prefill_hit), num_tokens)
            on_d = rates.queue_s(d) + rates.prefill_s(d, _sure(route.decode_hit), num_tokens)
            pull = HAND_OVER_S + rates.transfer_s(d, route.decode_hit, num_tokens)
            is_local, reason = INTERFERENCE * on_d <= on_p + pull, "sooner_on_d"
        else:
            uncached = num_tokens - route.decode_hit.resumable
            is_local, reason = uncached < self._threshold, "below_threshold"
        if not is_local:
            return route
        return replace(route, prefill=None, prefill_hit=NO_HIT, reason=reason)


def _sure(hit: NodeHit) -> NodeHit:
    """The hit without the attention that has no state, which by itself saves no computing."""
    tokens, discount = hit.resumable, hit.resumable_discount
    return NodeHit(tokens, tokens, discount, discount)
