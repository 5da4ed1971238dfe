"""THE SEAM: how the engine gets K/V and states from outside, without knowing from whom or how.

Three small interfaces, one per thread that calls them: admission (event loop), scheduler and worker
(engine thread). The engine owns the interfaces; `connector/` implements them: a hand-over between
nodes, a slower tier, or several of them as one. Verbs are vLLM's where it has one.

    one step    schedule: match .. start_load .. build_meta  ->  message
                worker:   start_save | zero, copy | start_load | compute | get_finished
                update:   update(output) .. request_finished
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import KVTransferParamsError
from engine.kv_cache.coverage import NOTHING, Coverage
from engine.kv_cache.listener import CacheListener
from engine.request import Request
from engine.step import BlockLoad, ConnectorMeta, ConnectorOutput, ScheduledRequest
from engine.types import (
    GenerateRequest,
    HandOverProblem,
    KVTransferParams,
    KVTransferStats,
    TokenId,
    TokenLogprob,
)


@dataclass(slots=True, frozen=True)
class Match:
    """What a connector can load of one prompt.

    `weight`: what one of its tokens is worth beside another connector's. `is_pending`: it does not
    know yet; the request waits and is asked about again, while others start. `lost`: tokens that
    were computed elsewhere and cannot be had, and why.
    """

    coverage: Coverage = NOTHING
    weight: float = 1.0
    is_pending: bool = False
    lost: tuple[int, str] | None = None


@dataclass(slots=True, frozen=True)
class FinishDecision:
    """What becomes of a finished request's blocks: each of `num_holds` keeps them until released.

    `kv_transfer_params` and `kv_transfer` go to the client with the last output.
    """

    num_holds: int = 0
    kv_transfer_params: KVTransferParams | None = None
    kv_transfer: KVTransferStats | None = None


@dataclass(slots=True, frozen=True)
class FirstToken:
    """The first output token, which another node has sampled."""

    token_id: TokenId
    logprob: TokenLogprob | None = None


@dataclass(slots=True, frozen=True)
class Admitted:
    """A request as it is to be computed here, and its first output token if that is known."""

    request: GenerateRequest
    first_token: FirstToken | None = None


class AdmissionConnector(ABC):
    """Judges `kv_transfer_params` before a request enters the engine; runs on the event loop."""

    @abstractmethod
    async def admit(self, request: GenerateRequest) -> Admitted:
        """Accepts the transfer parameters or raises KVTransferParamsError or KVLoadError."""

    @abstractmethod
    def withdraw(self, request_id: str) -> None:
        """Undoes `admit` for a request that never reached the scheduler."""

    def problems(self) -> tuple[HandOverProblem, ...]:
        """Peers from which this node takes hand-overs in vain at present."""
        return ()


class SchedulerConnector(ABC):
    """Decides what comes from outside and what is kept for others; runs in the engine thread.

    `cache_listener`: hears what becomes findable in the cache and what is about to go.
    """

    cache_listener: CacheListener | None = None

    @abstractmethod
    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        """What can be loaded of a prompt of which `num_local_tokens` are here.

        A pure question, asked at every attempt to start. None: this connector has nothing to do
        with the request.
        """

    @abstractmethod
    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        """Blocks are reserved: the next message starts `load`; None: the match is not needed.

        Returns how many ends (loaded or failed) the worker side will report for it.
        """

    @abstractmethod
    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        """This step's message, once all its blocks are reserved; empties what it reports.

        Blocks that this reservation has evicted were announced by `cache_listener.evicting`: the
        worker side must have read them when `start_save` returns.
        """

    def update(self, output: ConnectorOutput) -> None:
        """Hears what the worker side reported, before the scheduler acts on it."""
        return None

    def request_finished(self, request: Request) -> FinishDecision:
        """The request ended for any reason; says whether its blocks must stay."""
        return FinishDecision()

    def end_hold(self, request_id: str | None) -> str | None:
        """Ends a hold early: of a request that nobody heard of, or (None) of the least needed one.

        For a named request `released` reports the end later, and this returns None. Without a name
        memory is short: returns the request whose hold has ended now, or None if there is none.
        """
        return None

    def close(self) -> None:
        """Gives back what the scheduler side holds."""
        return None


class WorkerConnector(ABC):
    """Moves the bytes; polled by the engine thread and never blocks it."""

    def start_save(self, message: Any) -> None:
        """Begins the saves of `message`; evicted blocks have been read when it returns.

        Runs before anything of this step is written. Saved blocks are complete: they were computed
        in an earlier step, and stay as they are until `saved` names them.
        """
        return None

    @abstractmethod
    def start_load(self, message: Any) -> None:
        """Begins the loads of `message`, into blocks that nobody else uses; returns at once."""

    @abstractmethod
    def get_finished(self) -> ConnectorOutput:
        """What ended since the last call."""

    def next_deadline(self) -> float | None:
        """Monotonic time at which an idle engine must poll again, if any."""
        return None

    def close(self) -> None:
        """Stops every transfer and gives back mappings, registrations and threads."""
        return None


@dataclass(slots=True, frozen=True)
class Connector:
    """The three sides of one node's connector."""

    admission: AdmissionConnector
    scheduler: SchedulerConnector
    worker: WorkerConnector


class LocalAdmission(AdmissionConnector):
    """A node without peers: refuses every request that names one."""

    async def admit(self, request: GenerateRequest) -> Admitted:
        params = request.kv_transfer_params
        if params is not None:
            raise KVTransferParamsError(
                "this node was started without a KV connector", code="no_kv_connector"
            )
        return Admitted(request)

    def withdraw(self, request_id: str) -> None:
        pass


class LocalScheduler(SchedulerConnector):
    """Nothing comes from outside and nothing is kept."""

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        return None

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        return 0

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        return ConnectorMeta()


class LocalWorker(WorkerConnector):
    """No bytes move."""

    def start_load(self, message: Any) -> None:
        pass

    def get_finished(self) -> ConnectorOutput:
        return ConnectorOutput()


def local_connector() -> Connector:
    """The connector of a node that works alone."""
    return Connector(LocalAdmission(), LocalScheduler(), LocalWorker())
