"""P's side of a hand-over: hold a finished prefill under a lease, and say where it is."""

from dataclasses import dataclass

from connector.pd.lease import LeaseTable
from connector.pd.params import ParamsSigner, prompt_digest
from engine.kv_cache.plan import ArenaPlan
from engine.kv_connector import FinishDecision, SchedulerConnector, WorkerConnector
from engine.metrics import TransferMetrics
from engine.request import Request, is_remote_decode
from engine.step import BlockPull, ConnectorMeta, ConnectorOutput
from engine.types import FinishReason, KVTransferParams


@dataclass(slots=True)
class AdvertisedAddress:
    """Where peers reach this node's control service; `port` is set once the server is bound."""

    engine_id: str
    host: str
    port: int = 0


class ProducerScheduler(SchedulerConnector):
    """Keeps the blocks of requests that another node will decode."""

    def __init__(
        self,
        address: AdvertisedAddress,
        plan: ArenaPlan,
        leases: LeaseTable,
        *,
        signer: ParamsSigner,
    ) -> None:
        self._address = address
        self._plan = plan
        self._leases = leases
        self._signer = signer

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """A producer loads nothing."""
        return 0

    def update_state_after_alloc(self, request: Request, pull: BlockPull | None) -> None:
        """A producer promised nothing."""

    def build_connector_meta(self) -> ConnectorMeta:
        """The worker side needs no message: blocks stay where they are."""
        return ConnectorMeta()

    def request_finished(self, request: Request) -> FinishDecision:
        """Holds a remote decode's blocks until the lease ends; anything else is not ours."""
        if not is_remote_decode(request.origin) or request.finish_reason is FinishReason.ABORT:
            return FinishDecision()
        assert request.blocks is not None
        tables = request.blocks
        offsets = tuple(
            tuple(self._plan.block_offset(group, block) for block in tables.used(group))
            for group in range(len(tables.groups))
        )
        self._leases.grant(request.request_id, offsets, request.num_prompt_tokens)
        return FinishDecision(hold=True, kv_transfer_params=self._params(request))

    def give_up(self, request_id: str) -> None:
        """Ends the lease now instead of letting it run out."""
        self._leases.release(request_id)

    def close(self) -> None:
        """Leases end with the process."""

    def _params(self, request: Request) -> KVTransferParams:
        tables = request.blocks
        assert tables is not None
        params = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._address.engine_id,
            remote_request_id=request.request_id,
            remote_block_ids=tuple(
                tuple(tables.used(group)) for group in range(len(tables.groups))
            ),
            remote_host=self._address.host,
            remote_port=self._address.port,
            remote_num_tokens=request.num_prompt_tokens,
            remote_prompt_digest=prompt_digest(request.token_ids[: request.num_prompt_tokens]),
            tp_size=1,
            first_token_ids=(request.token_ids[-1],),
            first_token_logprobs=(request.last_logprob,) if request.last_logprob else None,
            remote_num_cached_tokens=request.num_cached_tokens,
        )
        return self._signer.sign(params)


def held_bytes(plan: ArenaPlan, leases: LeaseTable) -> int:
    """Bytes of blocks and states that leases keep from being used for anything else.

    A block that several leases hold counts once for each.
    """
    return sum(
        plan.block_bytes(group) * len(offsets)
        for lease in leases.all_held()
        for group, offsets in enumerate(lease.offsets)
    )


class ProducerWorker(WorkerConnector):
    """Reports leases that ended; bytes are read one-sidedly by peers."""

    def __init__(self, leases: LeaseTable, metrics: TransferMetrics) -> None:
        self._leases = leases
        self._metrics = metrics
        self._counted = 0, 0

    def start_load_kv(self, meta: ConnectorMeta) -> None:
        """A producer loads nothing."""

    def get_finished(self) -> ConnectorOutput:
        """Requests whose lease was released or ran out."""
        released = self._leases.take_ended()
        self._count(self._leases.num_expired, self._leases.num_late_releases)
        return ConnectorOutput(released=released)

    def _count(self, expired: int, late: int) -> None:
        self._metrics.expired.inc(expired - self._counted[0])
        self._metrics.late_notifications.inc(late - self._counted[1])
        self._counted = expired, late

    def next_deadline(self) -> float | None:
        """When the earliest lease runs out."""
        return self._leases.next_deadline()

    def close(self) -> None:
        """Nothing is held here."""
