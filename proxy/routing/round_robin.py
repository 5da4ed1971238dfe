"""Each node in turn, P and D counted apart. Looks neither at load nor at the prompt."""

from collections.abc import Sequence

from engine.types import GenerateRequest
from proxy.cluster.node import NodeView
from proxy.routing.route import Route


class RoundRobin:
    """Fair when requests are alike."""

    def __init__(self) -> None:
        self._prefill_turn = 0
        self._decode_turn = 0

    def choose(
        self, request: GenerateRequest, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        chosen = decode[self._decode_turn % len(decode)]
        self._decode_turn += 1
        if not prefill:
            return Route(prefill=None, decode=chosen)
        self._prefill_turn += 1
        return Route(prefill=prefill[(self._prefill_turn - 1) % len(prefill)], decode=chosen)
