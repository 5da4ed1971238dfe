"""Server-sent events of one reply, and the usage that it tells. Knows no protocol."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from engine.errors import TandemError
from engine.types import KVTransferParams, KVTransferStats, RoutingDetails
from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.api.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from serving.http.errors import status_and_body

KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment of server-sent events, which every client skips."""

CLEANUP_TIMEOUT_S: Final = 10.0

_T = TypeVar("_T")


async def with_pauses(
    items: AsyncIterator[_T], interval_s: float
) -> AsyncGenerator[_T | None, None]:
    """`items`, and None whenever none has come for `interval_s`; 0: never.

    The iterator's errors are raised as they are. Close it before `items` are closed.
    """
    if not interval_s:
        async for item in items:
            yield item
        return
    while True:
        coming = asyncio.create_task(next_of(items))
        try:
            # Waiting cancels nothing: a pause must not end what it waits for.
            while not (await asyncio.wait({coming}, timeout=interval_s))[0]:
                yield None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming}, timeout=CLEANUP_TIMEOUT_S)
        came = coming.result()
        if not came:
            return
        yield came[0]


async def next_of(items: AsyncIterator[_T]) -> tuple[()] | tuple[_T]:
    """The next item alone, or nothing when there is none."""
    async for item in items:
        return (item,)
    return ()


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


class StreamWriter(Protocol):
    """Writes the events of one request; whoever calls counts each delta before it is written."""

    def delta(self, delta: Delta) -> bytes:
        """Events of one delta, perhaps none; before the first one those that open the stream."""
        ...

    def end(self) -> bytes:
        """Events after the last delta."""
        ...

    def failed(self, error: TandemError) -> bytes:
        """Events in place of all that would have come; the stream ends with them."""
        ...


class ReplyFormat(Protocol):
    """How one protocol writes replies."""

    @property
    def max_prompts(self) -> int: ...

    def reply(
        self, plan: Plan, choices: Sequence[Delta], counter: UsageCounter
    ) -> msgspec.Struct: ...

    def stream(self, plan: Plan, counter: UsageCounter) -> StreamWriter: ...


class ChunkFormat(Protocol):
    """Differences of chats and completions."""

    def chunks(
        self, plan: Plan, delta: Delta, *, first: bool, usage: Usage | UnsetType | None
    ) -> Sequence[msgspec.Struct]:
        """Chunks of one delta; `first` is true once per choice. Each chunk carries `usage`."""
        ...

    def usage_chunk(self, plan: Plan, counter: UsageCounter) -> msgspec.Struct:
        """The extra chunk that has usage and no choices."""
        ...


class ChunkWriter:
    """Nameless events with a chunk each, then usage if asked for, then [DONE]; or an error last."""

    def __init__(self, reply_format: ChunkFormat, plan: Plan, counter: UsageCounter) -> None:
        self._format = reply_format
        self._plan = plan
        self._counter = counter
        self._opened: set[int] = set()

    def delta(self, delta: Delta) -> bytes:
        # Once usage is asked for it is null in every chunk, unless it is to be counted up.
        plan = self._plan
        usage: Usage | UnsetType | None = self._counter.usage() if plan.continuous_usage else None
        usage = usage if plan.include_usage else UNSET
        first = delta.index not in self._opened
        self._opened.add(delta.index)
        chunks = self._format.chunks(plan, delta, first=first, usage=usage)
        return b"".join(_event(msgspec.json.encode(chunk)) for chunk in chunks)

    def end(self) -> bytes:
        end = _event(b"[DONE]")
        if not self._plan.include_usage:
            return end
        chunk = self._format.usage_chunk(self._plan, self._counter)
        return _event(msgspec.json.encode(chunk)) + end

    def failed(self, error: TandemError) -> bytes:
        return _event(status_and_body(error)[1])


def named_event(name: str, data: object) -> bytes:
    """An event with a name, as clients of newer protocols tell them apart."""
    return b"event: " + name.encode() + b"\n" + _event(msgspec.json.encode(data))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
