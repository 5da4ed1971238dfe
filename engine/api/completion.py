"""Replies of POST /v1/completions. Knows nothing of HTTP or streaming."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from engine.api.choices import Delta
from engine.api.json_body import convert
from engine.api.logprobs import completion_logprobs
from engine.api.plan import Plan, plan_completion
from engine.api.replies import CompletionChoice, CompletionReply, Usage
from engine.api.schema import MAX_PROMPTS, CompletionRequest
from engine.api.serving import Serving
from engine.api.shape import envelope_fields, if_asked
from engine.api.tally import ReplyTally, UsageTally
from engine.api.tokenizer import Tokenizer
from engine.types import KVTransferParams

_OBJECT = "text_completion"


class CompletionShape:
    """The older endpoint: one text per choice, one shape for whole replies and chunks."""

    max_prompts = MAX_PROMPTS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def plan(
        self, body: dict[str, Any], kv_params: KVTransferParams | None, serving: Serving
    ) -> Plan:
        return plan_completion(convert(body, CompletionRequest), kv_params, serving)

    def reply(self, plan: Plan, tally: ReplyTally) -> CompletionReply:
        return CompletionReply(
            **envelope_fields(plan),
            object=_OBJECT,
            choices=[self._choice(plan, delta, first=True) for delta in tally.whole_choices()],
            usage=tally.usage.usage(),
            kv_transfer_params=tally.usage.kv_transfer_params,
        )

    def chunks(
        self, plan: Plan, delta: Delta, *, first: bool, usage: Usage | UnsetType | None
    ) -> Sequence[CompletionReply]:
        chunk = CompletionReply(
            **envelope_fields(plan),
            object=_OBJECT,
            choices=[self._choice(plan, delta, first=first)],
            usage=usage,
            kv_transfer_params=delta.kv_transfer_params or UNSET,
        )
        return [chunk]

    def closing(self, plan: Plan, tally: UsageTally) -> CompletionReply:
        return CompletionReply(
            **envelope_fields(plan),
            object=_OBJECT,
            choices=[],
            usage=tally.usage(),
            kv_transfer_params=tally.kv_transfer_params,
        )

    def _choice(self, plan: Plan, delta: Delta, *, first: bool) -> CompletionChoice:
        logprobs = completion_logprobs(delta.logprobs, self._tokenizer, delta.text_offset)
        prompt = plan.prompt_of(delta.index)
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=logprobs if delta.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=if_asked(plan, prompt) if first else UNSET,
            token_ids=if_asked(plan, delta.token_ids),
        )
