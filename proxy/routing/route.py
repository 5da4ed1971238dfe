"""What a routing policy decides."""

from dataclasses import dataclass

from proxy.cluster.node import NodeView


@dataclass(slots=True, frozen=True)
class Route:
    """Where one request goes. Without a prefill node the decode node does it all."""

    prefill: NodeView | None
    decode: NodeView
