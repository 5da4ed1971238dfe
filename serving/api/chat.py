"""Replies of POST /v1/chat/completions. Knows nothing of HTTP or streaming."""

import uuid
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.api.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    FunctionCall,
    LogprobFormat,
    ToolCallReply,
    Usage,
)
from serving.api.streams import ChunkWriter, StreamWriter, UsageCounter
from serving.api.tokenizer import Tokenizer

_CHUNK = "chat.completion.chunk"


class ChatFormat:
    """One assistant message per choice; the first chunk of a choice carries the role."""

    max_prompts = 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._logprobs = LogprobFormat(tokenizer)

    def reply(self, plan: Plan, choices: Sequence[Delta], counter: UsageCounter) -> ChatReply:
        made = []
        for choice in choices:
            calls = _calls(choice, in_chunks=False)
            text = None if (calls or choice.reasoning) and not choice.text else choice.text
            message = ChatMessage(content=text, tool_calls=calls or UNSET, **_thoughts(choice))
            made.append(ChatChoice(**self._fields(plan, choice), message=message))
        return ChatReply(
            **plan.envelope("chat.completion", counter.kv_transfer_params),
            choices=made,
            usage=counter.usage(),
            prompt_token_ids=plan.if_asked(plan.prompt_of(0)),
            prompt_logprobs=UNSET
            if plan.num_prompt_logprobs is None
            else self._logprobs.prompt(plan, choices[0].prompt_logprobs),
        )

    def stream(self, plan: Plan, counter: UsageCounter) -> StreamWriter:
        return ChunkWriter(self, plan, counter)

    def chunks(
        self, plan: Plan, delta: Delta, *, first: bool, usage: Usage | UnsetType | None
    ) -> Sequence[ChatChunk]:
        calls = _calls(delta, in_chunks=True)
        text = UNSET if (calls or delta.reasoning) and not delta.text else delta.text
        content = ChatDelta(content=text, tool_calls=calls or UNSET, **_thoughts(delta))
        chunk = ChatChunk(
            **plan.envelope(_CHUNK, delta.kv_transfer_params),
            choices=[ChatChunkChoice(**self._fields(plan, delta), delta=content)],
            usage=usage,
        )
        if not first:
            return [chunk]
        # As OpenAI does: the role comes alone, before any text.
        role = ChatDelta(role="assistant", content="")
        opening = ChatChunk(
            **plan.envelope(_CHUNK),
            choices=[ChatChunkChoice(index=delta.index, delta=role)],
            usage=usage,
            prompt_token_ids=plan.if_asked(plan.prompt_of(0)),
        )
        return [opening, chunk]

    def usage_chunk(self, plan: Plan, counter: UsageCounter) -> ChatChunk:
        envelope = plan.envelope(_CHUNK, counter.kv_transfer_params)
        return ChatChunk(**envelope, choices=[], usage=counter.usage())

    def _fields(self, plan: Plan, delta: Delta) -> dict[str, Any]:
        """Fields that a whole choice and a piece of one share."""
        return {
            "index": delta.index,
            "logprobs": self._logprobs.chat(plan, delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": plan.if_asked(delta.token_ids),
        }


def _thoughts(delta: Delta) -> dict[str, str]:
    text = delta.reasoning
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _calls(delta: Delta, *, in_chunks: bool) -> list[ToolCallReply]:
    """The calls of a delta, each with a fresh id; one chunk holds the whole of a call."""
    return [
        ToolCallReply(
            id=f"call_{uuid.uuid4().hex[:24]}",
            function=FunctionCall(name=call.name, arguments=call.arguments),
            index=index if in_chunks else UNSET,
        )
        for index, call in enumerate(delta.tool_calls, start=delta.first_call)
    ]
