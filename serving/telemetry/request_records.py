"""Each request's way: where it went, when, and how it ended. Holds no text and no token.

    arrival |-- prefill on P --|-- on D: pull --|-- decode --------| end

One record feeds all who want to know: metrics, the log, the status page, traces. A proxy's record
has a `Visit` for each node that got the request; a node's own record has none.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from engine.errors import TandemError, is_client_fault
from engine.types import GenerateOutput, GenerateRequest, KVTransferStats

MAX_RECENT: Final = 60
LEFT: Final = "left"
"""The outcome where the caller stopped reading: it went away, or had found a stop string."""


@dataclass(slots=True)
class Visit:
    """One request on one node; times in seconds since the request's arrival.

    `traceparent` is for the node: the span that its own spans belong to.
    """

    kind: str
    node: str
    began: float
    reason: str
    traceparent: str
    first_output: float | None = None
    ended: float | None = None
    outcome: str = "cancelled"
    kv_transfer: KVTransferStats | None = None


class RecordReader:
    """Hears of requests; must be quick, and keep no prompt. What it does not need does nothing."""

    def began(self, record: "RequestRecord") -> None:
        """A request has arrived."""

    def output(self, record: "RequestRecord", output: GenerateOutput, gap_s: float | None) -> None:
        """An output was sent; `gap_s`: since the one with tokens before it, None for the first."""

    def ended(self, record: "RequestRecord") -> None:
        """A request is over; its outcome is known."""

    def visit_began(self, record: "RequestRecord", visit: Visit) -> None:
        """A node is about to get the request."""

    def visit_ended(self, record: "RequestRecord", visit: Visit) -> None:
        """A node is done with the request."""


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival on; `outcome` is a finish reason, an error's name or `left`.

    Times are in seconds since the arrival; an output without tokens, the end of a stream, is none
    that came late. `failed`: the client got an error, and not because its request was wrong.
    """

    request: GenerateRequest
    readers: Sequence[RecordReader] = ()
    arrived_at: float = field(default_factory=time.time)
    visits: list[Visit] = field(default_factory=list)
    first_output: float | None = None
    second_output: float | None = None
    last_output: float | None = None
    ended: float | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    outcome: str = ""
    failed: bool = False
    kv_transfer: KVTransferStats | None = None
    queue_s: float | None = None
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def age(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self._began

    def observe(self, output: GenerateOutput) -> None:
        """Counts one output as sent to the client now."""
        visit = self.visits[-1] if self.visits else None
        gap = None
        if output.token_ids:
            gap = self._sent(self.age)
            self.num_tokens += len(output.token_ids)
            if visit is not None and visit.first_output is None:
                visit.first_output = self.last_output
        if output.finish_reason is not None:
            self.outcome = output.finish_reason
            self.queue_s = output.queue_s
            self.kv_transfer = moved = output.kv_transfer
            if visit is not None:
                visit.kv_transfer = moved
            self.num_cached_tokens = output.num_cached_tokens
        for reader in self.readers:
            reader.output(self, output, gap)

    def _sent(self, now: float) -> float | None:
        """Tokens leave; returns the seconds since the ones before them."""
        previous, self.last_output = self.last_output, now
        if previous is None:
            self.first_output = now
            return None
        self.second_output = self.second_output or now
        return now - previous

    @contextmanager
    def visiting(
        self, kind: str, node: str, *, reason: str, outcome_of: Callable[[TandemError], str]
    ) -> Iterator[Visit]:
        """The request is on `node` until the block ends; `reason` why it was chosen."""
        visit = Visit(kind, node, self.age, reason, self.request.origin.traceparent)
        self.visits.append(visit)
        for reader in self.readers:
            reader.visit_began(self, visit)
        try:
            yield visit
            visit.outcome = "ok"
        except TandemError as error:
            visit.outcome = outcome_of(error)
            raise
        finally:
            visit.ended = self.age
            for reader in self.readers:
                reader.visit_ended(self, visit)


class RequestRecords:
    """Makes a record for each request and tells `readers`; keeps the last ones that ended."""

    def __init__(self, *readers: RecordReader) -> None:
        self.readers = list(readers)
        self.open: dict[int, RequestRecord] = {}
        self.recent: deque[RequestRecord] = deque(maxlen=MAX_RECENT)
        self.num_ended = 0
        self.num_failed = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_tokens = 0

    @contextmanager
    def recording(self, request: GenerateRequest) -> Iterator[RequestRecord]:
        """The record of `request`, which is over when the block ends."""
        record = RequestRecord(request, self.readers)
        self.open[id(record)] = record
        for reader in self.readers:
            reader.began(record)
        try:
            yield record
        # Broad, and raised again: a bug is a failure too, and no caller that left.
        except Exception as error:
            record.outcome = type(error).__name__
            record.failed = not (isinstance(error, TandemError) and is_client_fault(error))
            self.num_failed += record.failed
            raise
        finally:
            record.ended = record.age
            record.outcome = record.outcome or LEFT
            del self.open[id(record)]
            self.num_ended += 1
            self.num_prompt_tokens += record.num_prompt_tokens
            self.num_cached_tokens += record.num_cached_tokens
            self.num_tokens += record.num_tokens
            for reader in self.readers:
                reader.ended(record)
            # Prompts may be long, and a record outlives its request.
            record.request = GenerateRequest(
                request_id=request.request_id, prompt_token_ids=(), origin=request.origin
            )
            self.recent.append(record)

    def tokens_so_far(self) -> tuple[int, int]:
        """Prompt tokens whose first output has come, and generated tokens, since the start."""
        under_way = list(self.open.values())
        prompts = sum(it.num_prompt_tokens for it in under_way if it.first_output is not None)
        tokens = sum(it.num_tokens for it in under_way)
        return self.num_prompt_tokens + prompts, self.num_tokens + tokens
