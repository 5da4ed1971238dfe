"""Routes requests: what nodes hold of a prompt, what they soon will, and a policy's choice."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

from proxy.cluster.node import NodeView
from proxy.routing.in_flight import InFlight
from proxy.routing.local_prefill import LocalPrefill, Threshold
from proxy.routing.policies import POLICIES, Route
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NodeHit, RoutedPrompt

LONG_PROMPT: Final = 4096
"""Tokens from which a prompt is hashed on another thread, not between other requests' tokens."""


class Router:
    """One per proxy, on its event loop. `policy`: a key of `POLICIES`; `index` belongs to others.

    `disagg_threshold`: see `LocalPrefill`.
    """

    def __init__(self, policy: str, index: PrefixIndex, *, disagg_threshold: Threshold = 0) -> None:
        self.policy_name = policy
        self._policy = POLICIES[policy]()
        self._local = LocalPrefill(disagg_threshold)
        self._index = index
        self._in_flight = InFlight()

    async def refresh(self, prompt: RoutedPrompt) -> None:
        """Looks up what nodes hold of a prompt by their events."""
        if prompt.num_tokens < LONG_PROMPT or self._index.is_empty:
            prompt.hits = self._index.hits(prompt)
        else:
            prompt.hits = await asyncio.to_thread(self._index.hits, prompt)

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        """The policy's choice, with prompts under way counted at this moment; perhaps without P."""
        prompt.hits = self._in_flight.hits(prompt)
        if prompt.request.sampling.prompt_logprobs is not None:
            # Who computes the prompt reads no cached prefix; a D that pulls still has attention,
            # and nobody resumes from states.
            pulling = {node.name for node in decode} if prefill else ()
            prompt.hits = {
                name: NodeHit(hit.attention, attention_discount=hit.attention_discount)
                for name, hit in prompt.hits.items()
                if name in pulling
            }
        return self._local.applied(prompt, self._policy.choose(prompt, prefill, decode))

    def expecting(self, prompt: RoutedPrompt, node: NodeView) -> AbstractContextManager[None]:
        """The prompt runs on `node` until the block ends; see `InFlight.expecting`."""
        return self._in_flight.expecting(prompt, node.name, node.info.kv_events)

    def forget(self, name: str) -> None:
        """A node has restarted: what was expected of it will not come."""
        self._in_flight.forget(name)
