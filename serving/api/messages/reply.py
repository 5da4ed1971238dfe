"""Replies of POST /v1/messages, whole and as events. Knows nothing of HTTP."""

import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType, structs

from engine.errors import TandemError
from engine.types import KVTransferParams
from serving.api.choice_text import TOOL_CALLS, Delta
from serving.api.plan import Plan
from serving.api.streams import StreamWriter, UsageCounter, named_event
from serving.api.tool_syntaxes import ToolCall
from serving.http.errors import anthropic_failure

SIGNATURE: Final = "unsigned"
"""Clients drop thoughts without a signature; nobody checks this one when they come back."""


class TextReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A block of text."""

    text: str
    citations: None = None


class ThinkingReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """A block of thoughts, as the model wrote them."""

    thinking: str
    signature: str = SIGNATURE


class ToolUseReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """One call; the client's tool_result names its `id`."""

    id: str
    name: str
    input: Raw


ReplyBlock = TextReply | ThinkingReply | ToolUseReply


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Number of tokens that the model spent on thoughts."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts in this protocol's words: input tokens are those that no cache had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    service_tier: str = "standard"


class MessageReply(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's whole message; the first event of a stream has one without content."""

    id: str
    model: str
    content: list[ReplyBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class MessageFormat:
    """One message per request."""

    max_prompts = 1

    def reply(self, plan: Plan, choices: Sequence[Delta], counter: UsageCounter) -> MessageReply:
        (delta,) = choices
        content: list[ReplyBlock] = []
        if delta.reasoning:
            content.append(ThinkingReply(thinking=delta.reasoning))
        if delta.text:
            content.append(TextReply(text=delta.text))
        content += map(_tool_use, delta.tool_calls)
        return MessageReply(
            id=plan.id,
            model=plan.model,
            # Clients look at the first block.
            content=content or [TextReply(text="")],
            usage=_usage(counter),
            kv_transfer_params=counter.kv_transfer_params,
            **structs.asdict(_ending(delta)),
        )

    def stream(self, plan: Plan, counter: UsageCounter) -> StreamWriter:
        return MessageWriter(plan, counter)


class Ending(msgspec.Struct, frozen=True):
    """Why a message ended."""

    stop_reason: str
    stop_sequence: str | None = None


def _ending(last: Delta) -> Ending:
    """Why the message ended; a token that stops it is no stop sequence."""
    if last.finish_reason == TOOL_CALLS:
        return Ending("tool_use")
    if last.finish_reason == "length":
        return Ending("max_tokens")
    if isinstance(last.stop_reason, str):
        return Ending("stop_sequence", last.stop_reason)
    return Ending("end_turn")


def _usage(counter: UsageCounter) -> MessageUsage:
    usage = counter.usage()
    cached = usage.prompt_tokens_details
    num_cached = cached.cached_tokens if cached else 0
    thoughts = ThinkingTokens(thinking_tokens=counter.reasoning_tokens)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=UNSET if counter.plan.thoughts is None else thoughts,
    )


def _tool_use(call: ToolCall) -> ToolUseReply:
    return ToolUseReply(
        id=f"toolu_{uuid.uuid4().hex[:24]}", name=call.name, input=Raw(call.arguments.encode())
    )


class MessageWriter:
    """Named events; blocks open and close one after the other."""

    def __init__(self, plan: Plan, counter: UsageCounter) -> None:
        self._plan = plan
        self._counter = counter
        self._num_blocks = 0  # closed ones: the index of the open one
        self._open: type[TextReply | ThinkingReply] | None = None
        self._last: Delta | None = None

    def delta(self, delta: Delta) -> bytes:
        events: list[bytes] = []
        if self._last is None:
            plan, usage = self._plan, _usage(self._counter)
            message = MessageReply(id=plan.id, model=plan.model, content=[], usage=usage)
            events.append(_event("message_start", message=message))
        self._last = delta
        if delta.reasoning:
            piece = {"type": "thinking_delta", "thinking": delta.reasoning}
            events += self._go_on(ThinkingReply(thinking="", signature=""), piece)
        if delta.text:
            piece = {"type": "text_delta", "text": delta.text}
            events += self._go_on(TextReply(text=""), piece)
        # A call is known when it is whole: its input comes in one piece.
        for call in delta.tool_calls:
            events += self._close()
            block = structs.replace(_tool_use(call), input=Raw(b"{}"))
            piece = {"type": "input_json_delta", "partial_json": call.arguments}
            events += [self._block_start(block), self._piece(piece), self._stop()]
        return b"".join(events)

    def end(self) -> bytes:
        assert self._last is not None  # a stream without a delta fails
        events = []
        if not self._num_blocks and self._open is None:  # as in a whole reply
            events += self._begin(TextReply(text=""))
        events += self._close()
        usage = _usage(self._counter)
        events.append(_event("message_delta", delta=_ending(self._last), usage=usage))
        return b"".join([*events, _event("message_stop")])

    def failed(self, error: TandemError) -> bytes:
        return named_event("error", Raw(anthropic_failure(error)))

    def _go_on(self, block: TextReply | ThinkingReply, piece: dict[str, str]) -> list[bytes]:
        """Add a piece to the open block, or to a new one, `block`, if that is of the other kind."""
        events = []
        if self._open is not type(block):
            events = [*self._close(), *self._begin(block)]
        return [*events, self._piece(piece)]

    def _begin(self, block: TextReply | ThinkingReply) -> list[bytes]:
        self._open = type(block)
        return [self._block_start(block)]

    def _close(self) -> list[bytes]:
        """End the open block, if there is one."""
        if self._open is None:
            return []
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        events = [self._piece(signed)] if self._open is ThinkingReply else []
        self._open = None
        return [*events, self._stop()]

    def _block_start(self, block: ReplyBlock) -> bytes:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _piece(self, piece: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=piece)

    def _stop(self) -> bytes:
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        return _event("content_block_stop", index=index)


def _event(name: str, /, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})
