"""Server-sent events of one reply. What a protocol writes into them is its format's affair."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from engine.errors import TandemError
from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.api.replies import Usage
from serving.api.usage import UsageCounter
from serving.http.errors import status_and_body


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
    """How one protocol writes replies. `id_prefix` begins their ids."""

    @property
    def max_prompts(self) -> int: ...

    @property
    def id_prefix(self) -> str: ...

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
    """Nameless events with a chunk each, then usage if asked for, then [DONE].

    An error is the last event, and no [DONE] follows.
    """

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
