"""The node with the fewest requests, P and D judged apart. Does not look at the prompt."""

from collections.abc import Sequence

from engine.types import GenerateRequest
from proxy.cluster.node import NodeView
from proxy.routing.route import Route


class LeastLoaded:
    """Follows queues; between equals the first node wins."""

    def choose(
        self, request: GenerateRequest, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        return Route(prefill=min(prefill, key=_load, default=None), decode=min(decode, key=_load))


def _load(node: NodeView) -> tuple[int, float]:
    """What this proxy knows to be in flight is newer than what the node said of itself."""
    reported = node.num_requests_running + node.num_requests_waiting
    return max(reported, node.num_in_flight), node.kv_cache_usage
