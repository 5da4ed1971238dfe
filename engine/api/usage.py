"""Counts the tokens of a request for the `usage` of its reply."""

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from engine.api.choice_text import Delta
from engine.api.plan import Plan
from engine.api.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from engine.types import KVTransferParams, KVTransferStats, RoutingDetails


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
        """Usage so far. A prompt with several choices counts once, and so do its cached tokens."""
        plan, tells_cache = self.plan, not self.plan.hides_cache
        prompt_tokens = plan.num_prompt_tokens
        details = PromptTokensDetails(cached_tokens=sum(self.cached_tokens.values()))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=details if tells_cache and plan.prompt_tokens_details else None,
            completion_tokens_details=UNSET
            if plan.thoughts is None
            else CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens),
            kv_transfer=self.kv_transfer if tells_cache else UNSET,
            routing=self.routing if tells_cache else UNSET,
        )
