"""Estimates of what a request takes on a node, in seconds. Pure.

Rates are the nodes' own measurements. A node that has measured nothing yet counts as its peers do,
and where nobody has, a constant stands in: only the choice between nodes depends on it.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

from proxy.cluster.node import NodeView
from proxy.routing.prompt import NodeHit

PREFILL_TOKENS_PER_S: Final = 5_000.0
DECODE_TOKENS_PER_S: Final = 500.0
LINK_BYTES_PER_S: Final = 1e9
KV_BYTES_PER_TOKEN: Final = 32_768.0
DECODE_TOKENS_AHEAD: Final = 16
"""Tokens of an answer for which it counts how many requests share D."""
ALIKE: Final = 2.0
"""Measured rates that differ less from the mean are noise, and count as the mean.

Each node measures under a load of its own. If noise counted, one of two equal nodes would get all.
"""
LINKS_ALIKE: Final = 8.0
"""The same for links: a pull of few bytes measures its latency, so D's with hits seem slower."""
FREE_REQUESTS: Final = 8
"""Requests that a decode node serves about as fast as one.

A step of few sequences waits for weights, not for sums. If each of them counted, every difference
of one request would outweigh what the node holds, and conversations would wander.
"""
POTENTIAL: Final = 0.5
"""The worth of a token whose attention is cached without a state to resume from.

A node that has the attention of a prompt soon has a state at its branch point too, so prompts that
share a prefix should meet there; half of the value did best in replays of published traces.
"""


class Rates:
    """Rates for a node that has measured none: the means of the decode nodes that have.

    Each is computed when the first node lacks it, which few do for long.
    """

    def __init__(self, prefill: Sequence[NodeView], decode: Sequence[NodeView]) -> None:
        self._prefill = prefill
        self._decode = decode

    @cached_property
    def prefill_tokens_per_s(self) -> float:
        """Of prefill nodes; where none of them knows, of decode nodes."""
        of_decode = _mean(
            (node.info.prefill_tokens_per_s for node in self._decode), PREFILL_TOKENS_PER_S
        )
        return _mean((node.info.prefill_tokens_per_s for node in self._prefill), of_decode)

    @cached_property
    def decode_tokens_per_s(self) -> float:
        return _mean((node.info.decode_tokens_per_s for node in self._decode), DECODE_TOKENS_PER_S)

    @cached_property
    def link_bytes_per_s(self) -> float:
        return _mean((node.info.link_bytes_per_s for node in self._decode), LINK_BYTES_PER_S)

    @cached_property
    def kv_bytes_per_token(self) -> float:
        return _mean((node.info.kv_bytes_per_token for node in self._decode), KV_BYTES_PER_TOKEN)

    def queue_s(self, node: NodeView) -> float:
        """Until `node` has computed the prompts that it already has."""
        # Of a hundred nodes most have nothing to wait for, so their rates need no look.
        if not (num_tokens := queued_tokens(node)):
            return 0.0
        return num_tokens / _rate(node.info.prefill_tokens_per_s, self.prefill_tokens_per_s)

    def prefill_s(self, node: NodeView, hit: NodeHit, num_tokens: int) -> float:
        """The computing of a prompt of `num_tokens` tokens on `node`."""
        resumable = hit.resumable - hit.resumable_discount
        potential = max(0.0, hit.attention - hit.attention_discount - resumable)
        uncached = num_tokens - resumable - POTENTIAL * potential
        return uncached / _rate(node.info.prefill_tokens_per_s, self.prefill_tokens_per_s)

    def transfer_s(self, node: NodeView, hit: NodeHit, num_tokens: int) -> float:
        """The pull of the states, and of the attention that decode node `node` lacks."""
        missing = num_tokens - hit.attention + hit.attention_discount
        per_token = node.info.kv_bytes_per_token or self.kv_bytes_per_token
        rate = _rate(node.info.link_bytes_per_s, self.link_bytes_per_s, LINKS_ALIKE)
        return (node.info.state_bytes + missing * per_token) / rate

    def decode_s(self, node: NodeView) -> float:
        """The first tokens of an answer among those that `node` already makes."""
        if (num_more := num_requests(node) - FREE_REQUESTS) <= 0:
            return 0.0
        rate = _rate(node.info.decode_tokens_per_s, self.decode_tokens_per_s)
        return num_more * DECODE_TOKENS_AHEAD / rate


def num_requests(node: NodeView) -> int:
    """Requests on a node: the proxy's own count is newer than what the node has reported."""
    return max(node.info.num_requests_running + node.info.num_requests_waiting, node.num_in_flight)


def queued_tokens(node: NodeView) -> int:
    """Prompt tokens that a node still has to compute, as far as is known.

    The proxy's own estimate is newer, and counts no token that is expected to be cached. Where a
    node has requests of others, its own count may be the larger one.
    """
    reported = node.info.num_requests_running + node.info.num_requests_waiting
    if reported <= node.num_in_flight:
        return node.num_tokens_in_flight
    return max(node.info.num_waiting_tokens, node.num_tokens_in_flight)


def _rate(own: float, mean: float, alike: float = ALIKE) -> float:
    """The rate to count with; a node that has measured nothing says 0."""
    is_alike = mean / alike <= own <= mean * alike
    return mean if is_alike or not own else own


def _mean(values: Iterable[float], default: float) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else default
