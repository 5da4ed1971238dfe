"""Replies of POST /v1/completions. Knows nothing of HTTP or streaming."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.api.replies import CompletionChoice, CompletionReply, LogprobFormat, Usage
from serving.api.schema import MAX_PROMPTS
from serving.api.streams import ChunkWriter, StreamWriter, UsageCounter
from serving.api.tokenizer import Tokenizer

_OBJECT = "text_completion"


class CompletionFormat:
    """The older endpoint: one text per choice, one format for whole replies and chunks."""

    max_prompts = MAX_PROMPTS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._logprobs = LogprobFormat(tokenizer)

    def reply(self, plan: Plan, choices: Sequence[Delta], counter: UsageCounter) -> CompletionReply:
        return CompletionReply(
            **plan.envelope(_OBJECT, counter.kv_transfer_params),
            choices=[self._choice(plan, delta, first=True) for delta in choices],
            usage=counter.usage(),
        )

    def stream(self, plan: Plan, counter: UsageCounter) -> StreamWriter:
        return ChunkWriter(self, plan, counter)

    def chunks(
        self, plan: Plan, delta: Delta, *, first: bool, usage: Usage | UnsetType | None
    ) -> Sequence[CompletionReply]:
        envelope = plan.envelope(_OBJECT, delta.kv_transfer_params)
        choice = self._choice(plan, delta, first=first)
        return [CompletionReply(**envelope, choices=[choice], usage=usage)]

    def usage_chunk(self, plan: Plan, counter: UsageCounter) -> CompletionReply:
        return self.reply(plan, [], counter)

    def _choice(self, plan: Plan, delta: Delta, *, first: bool) -> CompletionChoice:
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=self._logprobs.completion(plan, delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=plan.if_asked(plan.prompt_of(delta.index)) if first else UNSET,
            token_ids=plan.if_asked(delta.token_ids),
            prompt_logprobs=UNSET
            if plan.num_prompt_logprobs is None
            else self._logprobs.prompt(plan, delta.prompt_logprobs),
        )
