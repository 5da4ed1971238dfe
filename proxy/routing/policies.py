"""Routing: its seam, the policies, and the table of their names. None looks at the prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from engine.types import GenerateRequest
from proxy.cluster.node import NodeView


@dataclass(slots=True, frozen=True)
class Route:
    """The nodes of one request. Without a prefill node the decode node computes the prompt too."""

    prefill: NodeView | None
    decode: NodeView


class RoutingPolicy(Protocol):
    """Chooses P and D of one request together. Runs on the event loop and must not wait."""

    def choose(
        self, request: GenerateRequest, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        """`decode` holds at least one node; an empty `prefill` means that D must do it all."""
        ...


class RoundRobin:
    """The next node for each request, P and D counted apart. Fair when requests are alike."""

    def __init__(self) -> None:
        self._num_prefill = 0
        self._num_decode = 0

    def choose(
        self, request: GenerateRequest, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        chosen = decode[self._num_decode % len(decode)]
        self._num_decode += 1
        if not prefill:
            return Route(prefill=None, decode=chosen)
        self._num_prefill += 1
        return Route(prefill=prefill[(self._num_prefill - 1) % len(prefill)], decode=chosen)


class LeastLoaded:
    """The node with the fewest requests, P and D judged apart; between equals the first."""

    def choose(
        self, request: GenerateRequest, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        return Route(prefill=min(prefill, key=_load, default=None), decode=min(decode, key=_load))


def _load(node: NodeView) -> tuple[int, float]:
    # The proxy's own count of requests in flight is newer than what the node reported.
    reported = node.info.num_requests_running + node.info.num_requests_waiting
    return max(reported, node.num_in_flight), node.info.kv_cache_usage


POLICIES: Final[Mapping[str, Callable[[], RoutingPolicy]]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
