"""What happened to each request: where it went, when, and how it ended. Holds no text and no token.

    arrival |-- prefill on P --|-- on D: pull --|-- decode --------| end

One record feeds all who want to know: latencies, the log, the status page, traces.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine.errors import TandemError
from engine.types import FinishReason, GenerateOutput, GenerateRequest, KVTransferStats
from proxy.errors import outcome_of
from proxy.metrics import ProxyMetrics, RequestTimer

MAX_RECENT: Final = 60
LEFT: Final = "left"
"""The outcome where the caller stopped reading: it went away, or had found a stop string."""


@dataclass(slots=True)
class Visit:
    """One request on one node; times in seconds since the request's arrival."""

    kind: str
    node: str
    began: float
    reason: str
    first_output: float | None = None
    ended: float | None = None
    outcome: str = "cancelled"
    kv_transfer: KVTransferStats | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival on; `outcome` is a finish reason, an error's name or `left`."""

    request: GenerateRequest
    timer: RequestTimer
    arrived_at: float = field(default_factory=time.time)
    visits: list[Visit] = field(default_factory=list)
    first_output: float | None = None
    ended: float | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    outcome: str = ""
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def age(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self._began

    def observe(self, output: GenerateOutput) -> None:
        """Counts one output as sent to the client now."""
        self.timer.observe(output)
        if self.first_output is None:
            self.first_output = self.age
        visit = self.visits[-1]
        if visit.first_output is None:
            visit.first_output = self.age
        self.num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            moved = output.kv_transfer
            # D finds what P has computed, or found: only P's own cache saved anything.
            here = output.num_cached_tokens
            self.num_cached_tokens = here if moved is None else moved.prefill_cached_tokens
            visit.kv_transfer = moved
            self.outcome = output.finish_reason

    @contextmanager
    def visiting(self, kind: str, node: str, reason: str) -> Iterator[Visit]:
        """The request is on `node` until the block ends; `reason` why it was chosen."""
        visit = Visit(kind, node, self.age, reason)
        self.visits.append(visit)
        try:
            yield visit
            visit.outcome = "ok"
        except TandemError as error:
            visit.outcome = outcome_of(error)
            raise
        finally:
            visit.ended = self.age


class RecordReader(Protocol):
    """Hears of requests; must be quick, and keep no prompt."""

    def began(self, record: RequestRecord) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


class RequestRecords:
    """Makes a record for each request and tells `readers`; keeps the last ones that ended."""

    def __init__(self, metrics: ProxyMetrics, readers: Sequence[RecordReader] = ()) -> None:
        self._metrics = metrics
        self._readers = readers
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
        record = RequestRecord(request, RequestTimer(self._metrics))
        self.open[id(record)] = record
        for reader in self._readers:
            reader.began(record)
        try:
            yield record
        except TandemError as error:
            record.outcome = type(error).__name__
            self.num_failed += 1
            raise
        finally:
            record.ended = record.age
            record.outcome = record.outcome or LEFT
            del self.open[id(record)]
            self._end(record)

    def _end(self, record: RequestRecord) -> None:
        self.num_ended += 1
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_tokens += record.num_tokens
        for reader in self._readers:
            reader.ended(record)
        # Prompts may be long, and a record outlives its request.
        record.request = _without_prompt(record.request)
        self.recent.append(record)


def _without_prompt(request: GenerateRequest) -> GenerateRequest:
    return GenerateRequest(
        request_id=request.request_id, prompt_token_ids=(), origin=request.origin
    )


def is_failure(record: RequestRecord) -> bool:
    """True where the client got an error; a request that was wrong is none of the cluster's."""
    return record.outcome not in (*FinishReason, LEFT, "")
