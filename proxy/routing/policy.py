"""The seam for routing: what a policy is asked and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
