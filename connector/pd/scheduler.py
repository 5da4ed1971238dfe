"""The scheduler side of the PdConnector: what a peer has computed, and what is held for peers.

Decides and never waits; the bytes are the worker side's.
"""

from collections.abc import Sequence

from connector.pd.config import PdConnectorConfig
from connector.pd.decode.remote_prefills import RemotePrefills
from connector.pd.metrics import TransferMetrics
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.prefill.producer import Producer
from engine.kv_cache.coverage import Coverage
from engine.kv_connector import FinishDecision, Match, SchedulerConnector
from engine.request import Request
from engine.step import BlockLoad, ConnectorMeta, ScheduledRequest
from engine.types import KVTransferStats


class PdScheduler(SchedulerConnector):
    """Offers what a peer holds for a request, and holds what a peer goes on with.

    The turn before is pulled only if at least `kv_recompute_threshold` of its tokens are missing.
    """

    def __init__(
        self,
        producer: Producer,
        remote: RemotePrefills,
        *,
        leases: LeaseTable,
        extra: PdConnectorConfig,
        recomputes: bool,
        metrics: TransferMetrics,
    ) -> None:
        self._recomputes = recomputes
        self._producer = producer
        self._leases = leases
        self._remote = remote
        self._config = extra
        self._metrics = metrics
        self._loads: list[BlockLoad] = []

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        """All that the peer has computed, states included, while it can be pulled."""
        params = request.kv_transfer_params
        if params is None or not (params.do_remote_prefill or params.is_return_pull):
            return None
        prefill = self._remote.get(request.request_id)
        if prefill is None:
            return Match()
        num_tokens = prefill.num_tokens
        # A prefill that is computed again is a loss; nobody promised a turn before. A load that
        # failed has reported its own cause, which may be another than the first one here.
        is_lost = prefill.failure and not params.is_return_pull and not request.num_failed_loads
        if prefill.failure and is_lost and self._recomputes:
            return Match(lost=(num_tokens, prefill.failure))
        # Where nothing may be recomputed it is offered all the same: the load fails, and with it
        # the request.
        if not (prefill.can_be_pulled or is_lost):
            return Match()
        # What P computed for this request was cached nowhere; a turn before was computed for that.
        cached = None if params.is_return_pull else params.remote_num_cached_tokens or 0
        least = self._config.kv_recompute_threshold if params.is_return_pull else 1
        if num_tokens - num_local_tokens < max(least, 1):
            return Match(num_cached_tokens=cached)
        coverage = Coverage.of(num_tokens, (num_tokens,))
        return Match(coverage, self._config.load_weight, num_cached_tokens=cached)

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        """Queues the pull for the next message; without one, the peer may forget it now."""
        if load is not None:
            self._loads.append(load)
            return 1
        prefill = self._remote.get(request.request_id)
        if prefill is not None and prefill.can_be_pulled:
            if prefill.params.is_return_pull:
                self._metrics.return_pulls_skipped("below_threshold").inc()
            prefill.set_stats(request.num_computed_tokens)
            self._remote.settle(prefill)
        return 0

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        loads, self._loads = tuple(self._loads), []
        return ConnectorMeta(loads)

    def request_finished(self, request: Request) -> FinishDecision:
        """Ends its remote prefill, if it has one, and holds what another node goes on with."""
        params = self._producer.hold(request)
        prefill = self._remote.end(request.request_id)
        stats = prefill.stats if prefill else None
        if prefill and stats is None and prefill.failure:
            stats = KVTransferStats(cause=prefill.failure)
        return FinishDecision(int(params is not None), params, stats)

    def end_hold(self, request_id: str | None) -> str | None:
        """The answer whose next turn is the least likely to come in time goes first."""
        if request_id is None:
            return self._leases.take_back()
        self._leases.release(request_id)
        return None

    def close(self) -> None:
        """Every lease ends: readers may still see this memory when the node is gone."""
        self._leases.close()
