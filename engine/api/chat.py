"""Replies of POST /v1/chat/completions. Knows nothing of HTTP or streaming."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from engine.api.choices import Delta
from engine.api.json_body import convert
from engine.api.logprobs import chat_logprobs
from engine.api.plan import Plan, plan_chat
from engine.api.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    Usage,
)
from engine.api.schema import ChatRequest
from engine.api.serving import Serving
from engine.api.shape import envelope_fields, if_asked
from engine.api.tally import ReplyTally, UsageTally
from engine.api.tokenizer import Tokenizer
from engine.types import KVTransferParams

_REPLY = "chat.completion"
_CHUNK = "chat.completion.chunk"


class ChatShape:
    """One assistant message per choice; the first chunk of a choice carries the role."""

    max_prompts = 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def plan(
        self, body: dict[str, Any], kv_params: KVTransferParams | None, serving: Serving
    ) -> Plan:
        return plan_chat(convert(body, ChatRequest), kv_params, serving)

    def reply(self, plan: Plan, tally: ReplyTally) -> ChatReply:
        return ChatReply(
            **envelope_fields(plan),
            object=_REPLY,
            choices=[self._choice(plan, delta) for delta in tally.whole_choices()],
            usage=tally.usage.usage(),
            kv_transfer_params=tally.usage.kv_transfer_params,
            prompt_token_ids=if_asked(plan, plan.prompts[0]),
        )

    def chunks(
        self, plan: Plan, delta: Delta, *, first: bool, usage: Usage | UnsetType | None
    ) -> Sequence[ChatChunk]:
        chunk = ChatChunk(
            **envelope_fields(plan),
            object=_CHUNK,
            choices=[self._chunk_choice(plan, delta)],
            usage=usage,
            kv_transfer_params=delta.kv_transfer_params or UNSET,
        )
        return [self._opening(plan, delta.index, usage), chunk] if first else [chunk]

    def closing(self, plan: Plan, tally: UsageTally) -> ChatChunk:
        return ChatChunk(
            **envelope_fields(plan),
            object=_CHUNK,
            choices=[],
            usage=tally.usage(),
            kv_transfer_params=tally.kv_transfer_params,
        )

    def _opening(self, plan: Plan, index: int, usage: Usage | UnsetType | None) -> ChatChunk:
        role = ChatDelta(role="assistant", content="")
        return ChatChunk(
            **envelope_fields(plan),
            object=_CHUNK,
            choices=[ChatChunkChoice(index=index, delta=role)],
            usage=usage,
            prompt_token_ids=if_asked(plan, plan.prompts[0]),
        )

    def _choice(self, plan: Plan, delta: Delta) -> ChatChoice:
        return ChatChoice(
            index=delta.index,
            message=ChatMessage(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=if_asked(plan, delta.token_ids),
        )

    def _chunk_choice(self, plan: Plan, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=if_asked(plan, delta.token_ids),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.logprobs, self._tokenizer) if delta.logprobs else None
