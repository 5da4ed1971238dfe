"""THE SEAM: the engine gets K/V and states from outside, without knowing from whom or how.

Three small interfaces: admission (runs on the event loop), scheduler and worker (run in the engine
thread). The engine owns the interfaces; `connector/` implements them: a hand-over between nodes, a
slower tier, or several of them as one. Verbs are vLLM's where vLLM has one.

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
    """A connector's answer for one prompt: the tokens and states that it can load.

    `weight`: the worth of one of its tokens relative to another connector's. `is_pending`: the
    connector does not know yet; the request waits, is asked about again, and others start
    meanwhile. `lost`: number of tokens that were computed elsewhere and cannot be loaded, and why.
    `num_cached_tokens`: those that its sender did not compute for this request; None: all.
    """

    coverage: Coverage = NOTHING
    weight: float = 1.0
    is_pending: bool = False
    lost: tuple[int, str] | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True, frozen=True)
class FinishDecision:
    """The fate of a finished request's blocks: they stay until `num_holds` holds have ended.

    `kv_transfer_params` and `kv_transfer` go to the client with the last output.
    """

    num_holds: int = 0
    kv_transfer_params: KVTransferParams | None = None
    kv_transfer: KVTransferStats | None = None


@dataclass(slots=True, frozen=True)
class FirstToken:
    """The first output token, sampled by another node."""

    token_id: TokenId
    logprob: TokenLogprob | None = None


@dataclass(slots=True, frozen=True)
class Admitted:
    """A request as this node computes it, and its first output token if that is known."""

    request: GenerateRequest
    first_token: FirstToken | None = None


class AdmissionConnector(ABC):
    """Judges `kv_transfer_params` before a request enters the engine; runs on the event loop."""

    @abstractmethod
    async def admit(self, request: GenerateRequest) -> Admitted:
        """Accepts the transfer parameters. Raises KVTransferParamsError or KVLoadError."""

    @abstractmethod
    def withdraw(self, request_id: str) -> None:
        """Undoes `admit` for a request that never reached the scheduler."""

    def problems(self) -> tuple[HandOverProblem, ...]:
        """Peers whose hand-overs to this node keep failing."""
        return ()


class SchedulerConnector:
    """Decides what is loaded and what is kept for others; runs in the engine thread.

    Loads and keeps nothing unless it is overridden. `cache_listener` hears of everything that the
    cache stores and evicts. `supports_hma`: False for one that carries a single KV cache group;
    the name is vLLM's, and a node whose model has several groups refuses it at start.
    """

    cache_listener: CacheListener | None = None
    supports_hma: bool = True

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        """The part of a prompt that can be loaded, if `num_local_tokens` are here already.

        Has no side effects; the scheduler asks at every attempt to start the request. None: the
        request does not concern this connector.
        """
        return None

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        """Queues `load`, whose blocks are reserved, for the next message.

        None: the match is not needed. Returns how many ends (loaded or failed) the worker side will
        report for the load.
        """
        return 0

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        """This step's message, built after all its blocks are reserved; empties the queues.

        `cache_listener.removed` has announced the blocks that this reservation evicts. The worker
        side must have read them when `start_save` returns.
        """
        return ConnectorMeta()

    def update(self, output: ConnectorOutput) -> None:
        """Takes the worker side's report, before the scheduler acts on it."""
        return None

    def forget_evicted(self) -> None:
        """Nothing that was evicted since the last message is to be kept anywhere."""
        return None

    def request_finished(self, request: Request) -> FinishDecision:
        """Decides whether the blocks of a request that ended, for any reason, must stay."""
        return FinishDecision()

    def end_hold(self, request_id: str | None) -> str | None:
        """Ends a hold early: that of `request_id` (its answer was lost), or of the least needed.

        For a named request the worker side reports the end later, in `released`, and this returns
        None. Without a name memory is short: returns the request whose hold has ended now, or None
        if there is none.
        """
        return None

    def close(self) -> None:
        """Gives back what the scheduler side holds."""
        return None


class WorkerConnector:
    """Moves the bytes; polled by the engine thread and never blocks it.

    Moves none unless it is overridden.
    """

    def start_save(self, message: Any) -> None:
        """Begins the saves of `message`; evicted blocks have been read when it returns.

        Runs before this step writes anything. Saved blocks are complete: an earlier step computed
        them, and they stay unchanged until `ConnectorOutput.saved` names them.
        """
        return None

    def start_load(self, message: Any) -> None:
        """Begins the loads of `message`, into blocks that nobody else uses; never waits."""
        return None

    def get_finished(self) -> ConnectorOutput:
        """The transfers that ended since the last call."""
        return ConnectorOutput()

    def next_deadline(self) -> float | None:
        """Monotonic time (seconds) at which an idle engine must poll again, if any."""
        return None

    def close(self) -> None:
        """Stops every transfer and frees mappings, registrations and threads."""
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
