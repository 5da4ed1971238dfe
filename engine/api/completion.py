"""Replies of POST /v1/completions. Knows nothing of HTTP or streaming."""

from collections.abc import Sequence
from itertools import accumulate

from msgspec import UNSET, UnsetType

from engine.api.choice_text import Delta
from engine.api.plan import Plan
from engine.api.replies import CompletionChoice, CompletionLogprobs, CompletionReply, Usage, finite
from engine.api.schema import MAX_PROMPTS
from engine.api.tokenizer import Tokenizer
from engine.api.usage import UsageCounter
from engine.types import TokenLogprob

_OBJECT = "text_completion"


class CompletionFormat:
    """The older endpoint: one text per choice, one format for whole replies and chunks."""

    max_prompts = MAX_PROMPTS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def reply(self, plan: Plan, choices: Sequence[Delta], counter: UsageCounter) -> CompletionReply:
        return CompletionReply(
            **plan.envelope(_OBJECT, counter.kv_transfer_params),
            choices=[self._choice(plan, delta, first=True) for delta in choices],
            usage=counter.usage(),
        )

    def chunks(
        self, plan: Plan, delta: Delta, *, first: bool, usage: Usage | UnsetType | None
    ) -> Sequence[CompletionReply]:
        """Chunks of one delta; `first` is true once per choice. Each chunk carries `usage`."""
        envelope = plan.envelope(_OBJECT, delta.kv_transfer_params)
        choice = self._choice(plan, delta, first=first)
        return [CompletionReply(**envelope, choices=[choice], usage=usage)]

    def usage_chunk(self, plan: Plan, counter: UsageCounter) -> CompletionReply:
        return self.reply(plan, [], counter)

    def _choice(self, plan: Plan, delta: Delta, *, first: bool) -> CompletionChoice:
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=self._logprobs(delta) if delta.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=plan.if_asked(plan.prompt_of(delta.index)) if first else UNSET,
            token_ids=plan.if_asked(delta.token_ids),
        )

    def _logprobs(self, delta: Delta) -> CompletionLogprobs:
        """Log-probabilities; offsets count characters from the start of the choice's text."""
        tokens = [self._tokenizer.token_text(it.token_id) for it in delta.logprobs]
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[finite(entry.logprob) for entry in delta.logprobs],
            top_logprobs=[self._alternatives(entry) for entry in delta.logprobs],
            text_offset=list(accumulate(map(len, tokens[:-1]), initial=delta.text_offset)),
        )

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives by text, best first; the chosen token is always among them."""
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        return found
