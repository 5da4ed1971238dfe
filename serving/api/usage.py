"""Counts the tokens of a request for the `usage` of its reply."""

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from engine.types import KVTransferParams, KVTransferStats, RoutingDetails
from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.api.replies import CompletionTokensDetails, PromptTokensDetails, Usage


@dataclass(slots=True)
class UsageCounter:
    """Token counts of a whole request; bounded, whatever the length of its choices."""

    plan: Plan
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    kv_transfer: KVTransferStats | UnsetType = UNSET
    routing: RoutingDetails | UnsetType = UNSET

    def add(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self.reasoning_tokens += delta.num_reasoning_tokens
        if delta.index % self.plan.choices_per_prompt == 0:  # the prompt's first choice
            known = self.cached_tokens.get(delta.index, 0)
            self.cached_tokens[delta.index] = max(known, delta.num_cached_tokens)
        self.kv_transfer_params = delta.kv_transfer_params or self.kv_transfer_params
        self.kv_transfer = delta.kv_transfer or self.kv_transfer
        self.routing = delta.routing or self.routing

    def usage(self) -> Usage:
        """Usage so far. A prompt with several choices counts once, and so do its cached tokens.

        How much of a prompt was cached may tell what others have sent, so each count that shows it
        needs the server's permission; `Plan.tells_cache`.
        """
        plan = self.plan
        prompt_tokens = plan.num_prompt_tokens
        details = PromptTokensDetails(cached_tokens=sum(self.cached_tokens.values()))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=details if plan.tells_cache else None,
            completion_tokens_details=UNSET
            if plan.thoughts is None
            else CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens),
            # A pull moves what was not here, so its bytes tell as much as its counts.
            kv_transfer=self.kv_transfer if plan.tells_cache or plan.is_own_hand_over else UNSET,
            routing=UNSET if plan.hides_cache or not self.routing else self._route(self.routing),
        )

    def _route(self, routing: RoutingDetails) -> RoutingDetails:
        if self.plan.tells_cache:
            return routing
        return replace(
            routing,
            prefill_hit_tokens=UNSET,
            decode_hit_tokens=UNSET,
            prefix_tokens_lost_to_state=UNSET,
        )
