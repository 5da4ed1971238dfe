"""Routing policies: each chooses P and D of one request together, and says why.

Plain functions of a prompt and of snapshots of nodes; none waits, measures or asks anybody.
A program may add its own to `POLICIES` before it starts a proxy: `examples/own_routing_policy.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from operator import add
from typing import Final, Protocol

from proxy.cluster.node import NodeView
from proxy.routing.cost import Rates, num_requests
from proxy.routing.prompt import NO_HIT, NodeHit, RoutedPrompt

NEAR_THE_BEST: Final = 1.05
"""Nodes that cost so much more than the best are as good: estimates are not that exact."""


@dataclass(slots=True, frozen=True)
class Route:
    """The nodes of one request. Without a prefill node the decode node computes the prompt too.

    `reason`: one word for logs, metrics and clients. The hits are what the two nodes hold of the
    prompt, as far as the policy looked.
    """

    prefill: NodeView | None
    decode: NodeView
    reason: str
    prefill_hit: NodeHit = NO_HIT
    decode_hit: NodeHit = NO_HIT


class RoutingPolicy(Protocol):
    """Chooses the nodes of one attempt, on the event loop: it must not wait."""

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        """`decode` holds at least one node; an empty `prefill` means that D must do it all."""
        ...


class RoundRobin:
    """The next node for each request, P and D counted apart. Fair when requests are alike.

    Where one node alone is offered, such as a D whose P is chosen again, nothing is counted.
    """

    def __init__(self) -> None:
        self._num_prefill = 0
        self._num_decode = 0

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        chosen = decode[self._num_decode % len(decode)]
        self._num_decode += len(decode) > 1
        first = prefill[self._num_prefill % len(prefill)] if prefill else None
        self._num_prefill += len(prefill) > 1
        return _route(prompt, first, chosen, reason="next")


class LeastLoaded:
    """The node with the fewest requests, P and D judged apart; between equals the first."""

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        chosen = min(prefill, key=_load, default=None), min(decode, key=_load)
        return _route(prompt, *chosen, reason="load")


class Session:
    """All requests of one session on one P and one D, as long as both are there.

    When a node goes or comes, only sessions on that node move (rendezvous hashing); equal proxies
    choose alike. Load does not count. A request without a session goes to the least loaded nodes.
    """

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        session = prompt.request.session_id
        if session is None:
            return LeastLoaded().choose(prompt, prefill, decode)

        def weight(node: NodeView) -> bytes:
            return blake2b(f"{session}\0{node.name}".encode(), digest_size=8).digest()

        chosen = max(prefill, key=weight, default=None), max(decode, key=weight)
        return _route(prompt, *chosen, reason="session")


class PrefixAware:
    """The P that will have computed the prompt first, and the D that will have it first.

    P: what waits there, and the tokens without a state to resume from. D: the bytes that it lacks,
    over its link, and the requests that share it. Neither depends on the other, so the two best are
    the best pair. Of the nodes within 5 % of the least estimate it takes those with the least new
    work, again within 5 %, and of these the one chosen longest ago: equal prompts meet, and prompts
    that share little spread over all caches. No common prefix draws everything to one node, since
    what waits there counts. Where no node has events it is the least loaded one.
    """

    def __init__(self) -> None:
        self._clock = count(1)
        self._chosen_at: dict[str, int] = {}

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        rates, length = Rates(prefill, decode), prompt.num_tokens
        first = None
        if prefill:
            waits = [rates.queue_s(node) for node in prefill]
            works = [rates.prefill_s(node, prompt.hit(node.name), length) for node in prefill]
            first = self._best(prefill, waits, works)
        waits = [rates.decode_s(node) for node in decode]
        if first is None:
            # Without P the computing is D's as well.
            waits = [wait + rates.queue_s(node) for wait, node in zip(waits, decode, strict=True)]
        work = rates.prefill_s if first is None else rates.transfer_s
        works = [work(node, prompt.hit(node.name), length) for node in decode]
        chosen = self._best(decode, waits, works)
        route = _route(prompt, first, chosen, reason="load")
        if first is None:
            saved, has_events = route.decode_hit.resumable, chosen.info.kv_events
        else:
            saved = route.prefill_hit.resumable or route.decode_hit.attention
            has_events = first.info.kv_events or chosen.info.kv_events
        return replace(route, reason="prefix" if saved else "load" if has_events else "no_events")

    def _best(
        self, nodes: Sequence[NodeView], waits: Sequence[float], works: Sequence[float]
    ) -> NodeView:
        if not any(node.info.kv_events for node in nodes):
            return min(nodes, key=_load)
        costs = list(map(add, waits, works))
        limit = NEAR_THE_BEST * min(costs)
        near = [place for place, cost in enumerate(costs) if cost <= limit]
        limit = NEAR_THE_BEST * min(works[place] for place in near)
        equal = (nodes[place] for place in near if works[place] <= limit)
        chosen = min(equal, key=lambda node: self._chosen_at.get(node.name, 0))
        self._chosen_at[chosen.name] = next(self._clock)
        return chosen


def _load(node: NodeView) -> tuple[int, float]:
    return num_requests(node), node.info.kv_cache_usage


def _route(
    prompt: RoutedPrompt, prefill: NodeView | None, decode: NodeView, *, reason: str
) -> Route:
    prefill_hit = NO_HIT if prefill is None else prompt.hit(prefill.name)
    return Route(prefill, decode, reason, prefill_hit, prompt.hit(decode.name))


POLICIES: Final[dict[str, Callable[[], RoutingPolicy]]] = {
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
    "round_robin": RoundRobin,
    "session": Session,
}
