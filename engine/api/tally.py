"""Adds up a request's deltas: text, tokens, log-probs and usage. Knows no reply shape."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from engine.api.choices import Delta
from engine.api.plan import Plan
from engine.api.replies import PromptTokensDetails, Usage
from engine.types import (
    FinishReason,
    KVTransferParams,
    KVTransferStats,
    TokenId,
    TokenLogprob,
)


@dataclass(slots=True)
class ChoiceTally:
    """Everything that one choice has said so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: TokenId | str | None = None
    num_cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)

    def whole(self) -> Delta:
        """The choice as if it had come in one piece."""
        return Delta(
            index=self.index,
            text="".join(self.texts),
            text_offset=0,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(slots=True)
class UsageTally:
    """Token counts of a whole request; bounded, whatever the length of its choices."""

    plan: Plan
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    kv_transfer: KVTransferStats | UnsetType = UNSET

    def add(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.index % self.plan.choices_per_prompt == 0:
            known = self.cached_tokens.get(delta.index, 0)
            self.cached_tokens[delta.index] = max(known, delta.num_cached_tokens)
        self.kv_transfer_params = delta.kv_transfer_params or self.kv_transfer_params
        self.kv_transfer = delta.kv_transfer or self.kv_transfer

    def usage(self) -> Usage:
        """Usage so far. A prompt with several choices counts once, and so do its cached tokens."""
        prompt_tokens = sum(map(len, self.plan.prompts))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=self._details(),
            kv_transfer=self.kv_transfer,
        )

    def _details(self) -> PromptTokensDetails | None:
        if not self.plan.prompt_tokens_details:
            return None
        return PromptTokensDetails(cached_tokens=sum(self.cached_tokens.values()))


@dataclass(slots=True)
class ReplyTally:
    """All choices of a request and its usage."""

    plan: Plan
    usage: UsageTally = field(init=False)
    choices: list[ChoiceTally] = field(init=False)

    def __post_init__(self) -> None:
        self.usage = UsageTally(self.plan)
        self.choices = [ChoiceTally(index) for index in range(len(self.plan.requests))]

    def add(self, delta: Delta) -> None:
        self.choices[delta.index].add(delta)
        self.usage.add(delta)

    def whole_choices(self) -> Iterable[Delta]:
        return (choice.whole() for choice in self.choices)
