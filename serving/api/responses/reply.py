"""Replies of POST /v1/responses, whole and as events. Knows nothing of HTTP."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType, structs

from engine.errors import OverloadedError, TandemError
from engine.types import KVTransferParams
from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.api.replies import ContentLogprob, LogprobFormat
from serving.api.streams import StreamWriter, UsageCounter, named_event
from serving.api.tokenizer import Tokenizer
from serving.api.tool_syntaxes import ToolCall
from serving.http.errors import MAX_MESSAGE_CHARS


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message, with log-probabilities if they were asked for."""

    text: str
    annotations: list[None] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """Thoughts as the model wrote them."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Text of the assistant."""

    id: str
    content: list[OutputText]
    status: str = "completed"
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Thoughts of the model; there is never a summary."""

    id: str
    content: list[ReasoningText]
    status: str = "completed"
    summary: list[None] = []
    encrypted_content: str | None = None


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """One call; the client's function_call_output names its `call_id`."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of prompt tokens that came out of a cache, 0 where that is not told."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of tokens that the model spent on thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts in this protocol's words."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response object. `store` is false whatever was asked: nothing is stored."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    tools: list[Any]
    tool_choice: Any
    parallel_tool_calls: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: Any
    prompt_cache_key: Any
    reasoning: Any
    safety_identifier: Any
    temperature: float
    text: Any
    top_logprobs: int
    top_p: float
    truncation: str
    user: Any
    completed_at: int | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    object: str = "response"
    background: bool = False
    store: bool = False
    service_tier: str = "default"
    previous_response_id: None = None
    max_tool_calls: None = None
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class ResponseFormat:
    """One response per request."""

    max_prompts = 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._logprobs = LogprobFormat(tokenizer)

    def reply(self, plan: Plan, choices: Sequence[Delta], counter: UsageCounter) -> ResponseReply:
        (delta,) = choices
        output: list[OutputItem] = []
        if delta.reasoning:
            thoughts = [ReasoningText(text=delta.reasoning)]
            output.append(ReasoningItem(id=_new_id("rs"), content=thoughts))
        # Clients look for a message: an empty answer has one too, calls alone have none.
        if delta.text or not delta.tool_calls:
            text = OutputText(text=delta.text, logprobs=self.logprobs(plan, delta))
            status = "incomplete" if delta.finish_reason == "length" else "completed"
            output.append(MessageItem(id=_new_id("msg"), content=[text], status=status))
        output += map(_call_item, delta.tool_calls)
        return ended(plan, output, counter, finish_reason=delta.finish_reason)

    def stream(self, plan: Plan, counter: UsageCounter) -> StreamWriter:
        return ResponseWriter(self, plan, counter)

    def logprobs(self, plan: Plan, delta: Delta) -> list[ContentLogprob]:
        """Log-probabilities of the delta's tokens; empty unless asked for."""
        found = self._logprobs.chat(plan, delta)
        return [] if found is None else found.content


def ended(
    plan: Plan, output: list[OutputItem], counter: UsageCounter, *, finish_reason: str | None
) -> ResponseReply:
    """The response with all of its output; incomplete if it was cut off."""
    is_cut, sampling = finish_reason == "length", plan.requests[0].sampling
    return ResponseReply(
        id=plan.id,
        created_at=plan.created,
        completed_at=None if is_cut else int(time.time()),
        model=plan.model,
        status="incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        output=output,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        usage=_usage(counter),
        kv_transfer_params=counter.kv_transfer_params,
        **plan.repeated,
    )


def _usage(counter: UsageCounter) -> ResponseUsage:
    usage = counter.usage()
    cached = usage.prompt_tokens_details
    num_cached = cached.cached_tokens if cached else 0
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=num_cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=counter.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _call_item(call: ToolCall) -> FunctionCallItem:
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return FunctionCallItem(
        id=_new_id("fc"), call_id=call_id, name=call.name, arguments=call.arguments
    )


class ResponseWriter:
    """Named events with numbers from 0; items open and close one after the other."""

    def __init__(self, reply_format: ResponseFormat, plan: Plan, counter: UsageCounter) -> None:
        self._format = reply_format
        self._plan = plan
        self._counter = counter
        self._number = 0
        self._output: list[OutputItem] = []
        self._open: MessageItem | ReasoningItem | None = None
        self._text: list[str] = []
        self._logprobs: list[ContentLogprob] = []
        self._pending: list[ContentLogprob] = []  # of tokens whose text has not come yet
        self._finish_reason: str | None = None

    def delta(self, delta: Delta) -> bytes:
        events = [] if self._number else self._start()
        if delta.reasoning:
            events += self._go_on(ReasoningItem, delta.reasoning, [])
        self._pending += self._format.logprobs(self._plan, delta)
        if delta.text:
            logprobs, self._pending = self._pending, []
            events += self._go_on(MessageItem, delta.text, logprobs)
        # A call is known when it is whole: its arguments come in one piece.
        for call in delta.tool_calls:
            events += [*self._close(), *self._call(call)]
        self._finish_reason = delta.finish_reason or self._finish_reason
        return b"".join(events)

    def end(self) -> bytes:
        events = [] if self._number else self._start()
        has_said = any(
            not isinstance(it, ReasoningItem) for it in (*self._output, self._open) if it
        )
        if not has_said:  # an empty answer is an answer
            events += [*self._close(), *self._begin(MessageItem)]
        is_cut = self._finish_reason == "length"
        events += self._close("incomplete" if is_cut else "completed")
        reply = ended(self._plan, self._output, self._counter, finish_reason=self._finish_reason)
        events.append(self._event(f"response.{reply.status}", response=reply))
        return b"".join(events)

    def failed(self, error: TandemError) -> bytes:
        # Some clients raise at `error`, others read how the response ended.
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
        message = str(error)[:MAX_MESSAGE_CHARS]
        reply = structs.replace(
            ended(self._plan, self._output, self._counter, finish_reason=None),
            status="failed",
            completed_at=None,
            error={"code": code, "message": message},
        )
        event = self._event("error", code=code, message=message, param=None)
        return event + self._event("response.failed", response=reply)

    def _start(self) -> list[bytes]:
        # Usage is null until all is counted.
        reply = structs.replace(
            ended(self._plan, [], self._counter, finish_reason=None),
            status="in_progress",
            completed_at=None,
            usage=None,
        )
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=reply) for name in names]

    def _go_on(
        self, kind: type[MessageItem | ReasoningItem], text: str, logprobs: list[ContentLogprob]
    ) -> list[bytes]:
        """Add text to the open item, or to a new one if that is of the other kind."""
        events = []
        if not isinstance(self._open, kind):
            events = [*self._close(), *self._begin(kind)]
        self._text.append(text)
        self._logprobs += logprobs
        told: dict[str, Any] = {"logprobs": logprobs} if kind is MessageItem else {}
        return [*events, self._of_part(f"{_PARTS[kind]}.delta", delta=text, **told)]

    def _begin(self, kind: type[MessageItem | ReasoningItem]) -> list[bytes]:
        prefix = "msg" if kind is MessageItem else "rs"
        self._open = kind(id=_new_id(prefix), content=[], status="in_progress")
        added = self._event(
            "response.output_item.added", output_index=len(self._output), item=self._open
        )
        return [added, self._of_part("response.content_part.added", part=self._part())]

    def _part(self) -> OutputText | ReasoningText:
        text = "".join(self._text)
        if isinstance(self._open, ReasoningItem):
            return ReasoningText(text=text)
        return OutputText(text=text, logprobs=self._logprobs)

    def _close(self, status: str = "completed") -> list[bytes]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        if isinstance(self._open, MessageItem):
            self._logprobs += self._pending
            self._pending = []
        part = self._part()
        told = {"logprobs": self._logprobs} if isinstance(part, OutputText) else {}
        done = f"{_PARTS[type(self._open)]}.done"
        events = [
            self._of_part(done, text=part.text, **told),
            self._of_part("response.content_part.done", part=part),
        ]
        item = structs.replace(self._open, content=[part], status=status)
        self._open, self._text, self._logprobs = None, [], []
        return [*events, self._done(item)]

    def _call(self, call: ToolCall) -> list[bytes]:
        item = _call_item(call)
        name = "response.function_call_arguments"
        place = {"output_index": len(self._output)}
        told = {"item_id": item.id, **place}
        started = structs.replace(item, arguments="", status="in_progress")
        return [
            self._event("response.output_item.added", **place, item=started),
            self._event(f"{name}.delta", **told, delta=call.arguments),
            self._event(f"{name}.done", **told, name=call.name, arguments=call.arguments),
            self._done(item),
        ]

    def _done(self, item: OutputItem) -> bytes:
        index = len(self._output)
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _of_part(self, name: str, /, **fields: Any) -> bytes:
        """An event of the one part of the open item."""
        item_id = "" if self._open is None else self._open.id
        place = {"item_id": item_id, "output_index": len(self._output), "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})


_PARTS: Final[dict[type, str]] = {
    MessageItem: "response.output_text",
    ReasoningItem: "response.reasoning_text",
}
