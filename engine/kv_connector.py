"""THE SEAM: how the engine gets K/V and states from outside, without knowing from whom or how.

Three small interfaces, one per thread that calls them: admission (event loop), scheduler and worker
(engine thread). The engine owns the interfaces; `connector/` implements them. Verbs are vLLM's
where it has one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.errors import KVTransferParamsError
from engine.request import Request
from engine.step import BlockPull, ConnectorMeta, ConnectorOutput
from engine.types import GenerateRequest, HandOverProblem, KVTransferParams, KVTransferStats


@dataclass(slots=True, frozen=True)
class FinishDecision:
    """What becomes of a finished request's blocks: `hold` keeps them until they are released."""

    hold: bool = False
    kv_transfer_params: KVTransferParams | None = None
    kv_transfer: KVTransferStats | None = None


class AdmissionConnector(ABC):
    """Judges `kv_transfer_params` before a request enters the engine; runs on the event loop."""

    @abstractmethod
    async def admit(self, request: GenerateRequest) -> GenerateRequest:
        """Accepts the transfer parameters or raises KVTransferParamsError or KVLoadError.

        Returns the request to be computed: without parameters where nothing in them may be used.
        """

    @abstractmethod
    def withdraw(self, request_id: str) -> None:
        """Undoes `admit` for a request that never reached the scheduler."""

    @abstractmethod
    def problems(self) -> tuple[HandOverProblem, ...]:
        """Peers from which this node takes hand-overs in vain at present."""


class SchedulerConnector(ABC):
    """Decides what comes from outside and what is kept for others; runs in the engine thread."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens right behind `num_computed_tokens` to be loaded; 0 means compute here.

        They may end before the prompt does.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Request, pull: BlockPull | None) -> None:
        """Blocks are reserved: load into them from the next step on; None: nothing is loaded."""

    @abstractmethod
    def build_connector_meta(self) -> ConnectorMeta:
        """This step's message to the worker side; empties what it reports."""

    @abstractmethod
    def request_finished(self, request: Request) -> FinishDecision:
        """The request ended for any reason; says whether its blocks must stay."""

    @abstractmethod
    def give_up(self, request_id: str) -> None:
        """Nobody heard that `request_id` is held: its blocks need not stay any longer."""

    @abstractmethod
    def make_room(self) -> str | None:
        """Memory is short: a held request that nobody needs, whose blocks are free from now on."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the scheduler side holds."""


class WorkerConnector(ABC):
    """Moves the bytes; polled by the engine thread and never blocks it."""

    @abstractmethod
    def start_load_kv(self, meta: ConnectorMeta) -> None:
        """Begins the pulls of `meta`; returns at once."""

    @abstractmethod
    def get_finished(self) -> ConnectorOutput:
        """What finished, failed or was released since the last call."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """Monotonic time at which an idle engine must poll again, if any."""

    @abstractmethod
    def close(self) -> None:
        """Stops every transfer and gives back mappings, registrations and threads."""


@dataclass(slots=True, frozen=True)
class Connector:
    """The three sides of one node's connector."""

    admission: AdmissionConnector
    scheduler: SchedulerConnector
    worker: WorkerConnector


class LocalAdmission(AdmissionConnector):
    """A node without peers: refuses every request that names one."""

    async def admit(self, request: GenerateRequest) -> GenerateRequest:
        """Raises KVTransferParamsError when the request asks for a hand-over."""
        params = request.kv_transfer_params
        if params is not None and (params.do_remote_decode or params.do_remote_prefill):
            raise KVTransferParamsError(
                "this node was started without a KV connector", code="no_kv_connector"
            )
        return request

    def withdraw(self, request_id: str) -> None:
        """Nothing was admitted."""

    def problems(self) -> tuple[HandOverProblem, ...]:
        """There are no peers."""
        return ()


class LocalScheduler(SchedulerConnector):
    """Nothing comes from outside and nothing is kept."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Always 0."""
        return 0

    def update_state_after_alloc(self, request: Request, pull: BlockPull | None) -> None:
        """Nothing was promised."""

    def build_connector_meta(self) -> ConnectorMeta:
        """Always empty."""
        return ConnectorMeta()

    def request_finished(self, request: Request) -> FinishDecision:
        """Blocks are free at once."""
        return FinishDecision()

    def give_up(self, request_id: str) -> None:
        """Never called: nothing is held."""

    def make_room(self) -> str | None:
        """None: nothing is held."""
        return None

    def close(self) -> None:
        """Nothing is held."""


class LocalWorker(WorkerConnector):
    """No bytes move."""

    def start_load_kv(self, meta: ConnectorMeta) -> None:
        """Nothing to start."""

    def get_finished(self) -> ConnectorOutput:
        """Always empty."""
        return ConnectorOutput()

    def next_deadline(self) -> float | None:
        """Never."""
        return None

    def close(self) -> None:
        """Nothing is held."""


def local_connector() -> Connector:
    """The connector of a node that works alone."""
    return Connector(LocalAdmission(), LocalScheduler(), LocalWorker())
