"""The scheduler side of the PdConnector: what a peer has computed, and what is held for peers.

Decides and never waits. P's part is `prefill/producer.py`; of D's part, `decode/`, only the claims
are looked at here: the bytes are the worker side's.
"""

from collections.abc import Sequence

from connector.pd.config import PdConnectorConfig
from connector.pd.decode.puller import stats_of
from connector.pd.decode.remote_prefills import RemotePrefills
from connector.pd.metrics import TransferMetrics
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.prefill.producer import Producer
from engine.kv_cache.coverage import Coverage
from engine.kv_connector import FinishDecision, Match, SchedulerConnector
from engine.request import Request
from engine.step import BlockLoad, ConnectorMeta, ScheduledRequest


class PdScheduler(SchedulerConnector):
    """Offers what a peer holds for a request, and holds what a peer goes on with.

    Of the turn before, at least `kv_recompute_threshold` tokens must be missing here, or it is not
    pulled.
    """

    def __init__(
        self,
        producer: Producer,
        leases: LeaseTable,
        remote: RemotePrefills,
        *,
        config: PdConnectorConfig,
        metrics: TransferMetrics,
    ) -> None:
        self._producer = producer
        self._leases = leases
        self._remote = remote
        self._config = config
        self._metrics = metrics
        self._loads: list[BlockLoad] = []

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        """All that the peer has computed, states included, while its claim stands."""
        params = request.kv_transfer_params
        if params is None or not (params.do_remote_prefill or params.is_return_pull):
            return None
        claim = self._remote.get(request.request_id)
        if claim is None:
            return Match()
        if not claim.stands:
            # A turn before was promised by nobody; a prefill that is computed again is a loss.
            is_loss = claim.failure and not params.is_return_pull
            return Match(lost=(claim.num_tokens, claim.failure or "") if is_loss else None)
        missing = claim.num_tokens - num_local_tokens
        if missing < max(self._config.kv_recompute_threshold if params.is_return_pull else 1, 1):
            return Match()
        return Match(Coverage(claim.num_tokens, (claim.num_tokens,)), self._config.load_weight)

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        """Queues the pull for the next message; without one, the peer may forget it now."""
        if load is not None:
            self._loads.append(load)
            return 1
        claim = self._remote.get(request.request_id)
        if claim is not None and claim.stands:
            if claim.params.is_return_pull:
                self._metrics.return_pulls_skipped("below_threshold").inc()
            claim.stats = stats_of(claim, None, request.num_computed_tokens)
            self._remote.settle(claim)
        return 0

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        """The message is the loads queued since the last step."""
        loads, self._loads = tuple(self._loads), []
        return ConnectorMeta(loads)

    def request_finished(self, request: Request) -> FinishDecision:
        """Ends the claim, if there is one, and holds what another node goes on with."""
        params = self._producer.hold(request)
        claim = self._remote.end(request.request_id)
        return FinishDecision(
            num_holds=int(params is not None),
            kv_transfer_params=params,
            kv_transfer=claim.stats if claim else None,
        )

    def end_hold(self, request_id: str | None) -> str | None:
        """The answer whose next turn is the least likely to come in time goes first."""
        if request_id is None:
            return self._leases.take_back()
        self._leases.release(request_id)
        return None

    def close(self) -> None:
        """Every lease ends: readers may still see this memory when the node is gone."""
        self._leases.close()
        self._remote.close()
