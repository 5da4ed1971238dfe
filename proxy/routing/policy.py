"""The seam for routing: one verb, and the table of those who know it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from engine.types import GenerateRequest
from proxy.cluster.node import NodeView
from proxy.routing.least_loaded import LeastLoaded
from proxy.routing.round_robin import RoundRobin
from proxy.routing.route import Route


class RoutingPolicy(Protocol):
    """Chooses P and D of one request together; called on the event loop, must not wait."""

    def choose(
        self, request: GenerateRequest, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        """`decode` holds at least one node; an empty `prefill` means that D must do it all."""
        ...


POLICIES: Final[Mapping[str, Callable[[], RoutingPolicy]]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
