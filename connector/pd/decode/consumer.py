"""D's side of a hand-over: pull what P holds into blocks of this node, verify, publish.

And P's side of the way back, where D holds the turn before: the same claims, plans and reads. The
scheduler side decides and never waits; the worker side moves bytes on threads of its own, so a slow
peer delays neither the engine step nor other requests.
"""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from connector.pd import causes
from connector.pd.config import PdConnectorConfig
from connector.pd.decode.fair_pool import FairPool, PoolLimits
from connector.pd.decode.peer_registry import Peer
from connector.pd.decode.pull_plan import PullPlan, plan_pull
from connector.pd.decode.pull_reader import PullReader
from connector.pd.decode.remote_prefills import PrefillClaim, RemotePrefills
from connector.pd.layout import blocks_announced
from connector.pd.metrics import TransferMetrics
from connector.pd.wire.params import holding_of
from engine.errors import (
    DeadlineExceededError,
    LateReadError,
    OtherPromptError,
    OverloadedError,
    TandemError,
    TransportError,
    UnavailableError,
    VerificationError,
)
from engine.kv_cache.plan import ArenaPlan
from engine.kv_connector import FinishDecision, SchedulerConnector, WorkerConnector
from engine.request import Request
from engine.step import BlockPull, ConnectorMeta, ConnectorOutput
from engine.types import KVTransferStats

log = structlog.get_logger()


class ConsumerScheduler(SchedulerConnector):
    """Tells the scheduler which tokens are computed elsewhere.

    Of the turn before, at least `recompute_threshold` must be missing here, or it is not pulled.
    """

    def __init__(
        self, claims: RemotePrefills, *, recompute_threshold: int, metrics: TransferMetrics
    ) -> None:
        self._claims = claims
        self._recompute_threshold = recompute_threshold
        self._metrics = metrics
        self._pulls: list[BlockPull] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """All that the peer has computed and that is not here, while its claim stands."""
        claim = self._claims.get(request.request_id)
        if claim is None or not claim.stands:
            return 0
        missing = claim.num_tokens - num_computed_tokens
        worth_it = self._recompute_threshold if claim.params.is_return_pull else 1
        return missing if missing >= max(worth_it, 1) else 0

    def update_state_after_alloc(self, request: Request, pull: BlockPull | None) -> None:
        """Queues the pull for the next step; if nothing is needed, the peer may forget it now.

        What a peer has computed and cannot be had is computed again.
        """
        if pull is not None:
            self._pulls.append(pull)
            return
        claim = self._claims.get(request.request_id)
        if claim is not None and claim.failure and not claim.params.is_return_pull:
            request.lose(claim.num_tokens, claim.failure)
        if claim is not None and claim.stands:
            if claim.params.is_return_pull:
                self._metrics.return_pulls_skipped("below_threshold").inc()
            claim.stats = _stats(claim, None, request.num_computed_tokens)
            self._claims.settle(claim)

    def build_connector_meta(self) -> ConnectorMeta:
        """The pulls queued since the last step."""
        pulls, self._pulls = tuple(self._pulls), []
        return ConnectorMeta(pulls)

    def request_finished(self, request: Request) -> FinishDecision:
        """Ends the claim, if there is one left, and reports what the pull cost."""
        claim = self._claims.end(request.request_id)
        return FinishDecision(kv_transfer=claim.stats if claim else None)

    def give_up(self, request_id: str) -> None:
        """A consumer holds nothing."""

    def make_room(self) -> str | None:
        """A consumer holds nothing."""
        return None

    def close(self) -> None:
        """Gives every claim up."""
        self._claims.close()


class ConsumerWorker(WorkerConnector):
    """Owner of the reader and the pull threads. Results wait until the engine thread asks."""

    def __init__(
        self,
        plan: ArenaPlan,
        reader: PullReader,
        claims: RemotePrefills,
        *,
        metrics: TransferMetrics,
        config: PdConnectorConfig,
        wake: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._reader = reader
        self._claims = claims
        self._metrics = metrics
        self._timeout_s = config.transfer_timeout
        self._wake = wake
        self._results: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        limits = PoolLimits(
            total=config.max_concurrent_pulls,
            per_peer=config.pulls_per_peer,
            waiting=config.max_waiting_pulls,
        )
        self._pool = FairPool(limits, "kv-pull")
        self._stopping = threading.Event()

    def start_load_kv(self, meta: ConnectorMeta) -> None:
        """Hands each pull to the pull threads, which serve peers in turn; refused pulls fail."""
        for pull in meta.pulls:
            claim = self._claims.get(pull.request_id)
            peer = claim.peer.engine_id if claim and claim.peer else ""
            try:
                self._pool.submit(peer, partial(self._pull, pull))
            except OverloadedError as error:
                self._refuse(pull, claim, error)

    def get_finished(self) -> ConnectorOutput:
        """Pulls that ended since the last call."""
        loaded: list[str] = []
        failed: dict[str, str] = {}
        while not self._results.empty():
            request_id, cause = self._results.get_nowait()
            if cause is None:
                loaded.append(request_id)
            else:
                failed[request_id] = cause
        return ConnectorOutput(tuple(loaded), failed)

    def next_deadline(self) -> float | None:
        """None: a finished pull wakes the engine."""
        return None

    def close(self) -> None:
        """Waits for pulls in flight (each is bounded) and stops the threads; no more begin."""
        self._stopping.set()
        self._pool.close()
        self._reader.close()

    @property
    def pulls_by_stage(self) -> dict[str, int]:
        """Pulls by stage, in vLLM's words."""
        return {
            "waiting_to_start": self._pool.num_waiting,
            "in_progress": self._pool.num_running,
            "completed_waiting": self._results.qsize(),
        }

    def _refuse(self, pull: BlockPull, claim: PrefillClaim | None, error: OverloadedError) -> None:
        """Nobody will read: P hears it now, and the request is computed here or fails."""
        log.warning("a pull was refused", error=str(error))
        if claim is not None:
            self._metrics.failed.inc()
            claim.fail(causes.TOO_MANY_PULLS)
            self._claims.settle(claim)
        self._results.put((pull.request_id, causes.TOO_MANY_PULLS))
        self._wake()

    def _pull(self, pull: BlockPull) -> None:
        """On a pull thread: every outcome becomes a result, or a request would wait for ever.

        The engine hears of it first, and P, whose lease ends, after that.
        """
        claim = self._claims.get(pull.request_id)
        cause: str | None = causes.TRANSFER_FAILED
        try:
            cause = self._try_pull(claim, pull)
        finally:
            self._results.put((pull.request_id, cause))
            self._wake()
            if claim is not None:
                self._claims.settle(claim, "read" if cause is None else "given up")

    def _try_pull(self, claim: PrefillClaim | None, pull: BlockPull) -> str | None:
        if claim is None or claim.peer is None or self._stopping.is_set():
            return causes.REQUEST_ENDED
        try:
            self._load(claim, claim.peer, pull)
        except TandemError as error:
            cause = causes.of_read(error)
            if cause == causes.LATE_READ:
                self._metrics.late_reads.inc()
            self._claims.failed(claim, cause, error)
            return cause
        self._claims.worked(claim)
        return None

    def _load(self, claim: PrefillClaim, peer: Peer, pull: BlockPull) -> None:
        started = time.monotonic()
        num_tokens, offsets = claim.num_tokens, claim.offsets(peer)
        spans = plan_pull(
            self._plan,
            blocks_announced(self._plan, peer.groups, offsets, num_tokens=num_tokens),
            pull.tables,
            num_tokens=num_tokens,
            num_local_tokens=pull.num_local_tokens,
        )
        verified = self._read(claim, peer, spans, holding=holding_of(claim.prompt_digest, offsets))
        seconds = time.monotonic() - started
        self._book(spans, seconds)
        claim.stats = _stats(
            claim, spans, pull.num_local_tokens, transfer_ms=1e3 * seconds, verified=verified
        )

    def _read(self, claim: PrefillClaim, peer: Peer, spans: PullPlan, *, holding: bytes) -> bool:
        """Behind a failed read, or a P that cannot be asked, the next claim shakes hands again."""
        try:
            return self._reader.read(
                peer,
                spans,
                request_id=claim.remote_request_id,
                generation=claim.generation,
                holding=holding,
                timeout_s=self._timeout_s,
            )
        except (LateReadError, OtherPromptError, VerificationError):
            raise
        except (TransportError, UnavailableError, DeadlineExceededError):
            self._claims.forget(peer)
            raise

    def _book(self, spans: PullPlan, seconds: float) -> None:
        self._metrics.pulled(
            seconds,
            spans=len(spans.spans),
            attention_bytes=spans.attention_bytes,
            state_bytes=spans.state_bytes,
        )


def _stats(
    claim: PrefillClaim,
    spans: PullPlan | None,
    num_local_tokens: int,
    *,
    transfer_ms: float = 0.0,
    verified: bool = False,
) -> KVTransferStats:
    there = claim.params.remote_num_cached_tokens or 0
    is_back = claim.params.is_return_pull
    return KVTransferStats(
        attention_bytes=spans.attention_bytes if spans else 0,
        state_bytes=spans.state_bytes if spans else 0,
        transfer_ms=transfer_ms,
        prefill_cached_tokens=num_local_tokens if is_back else there,
        decode_cached_tokens=there if is_back else num_local_tokens,
        verified=verified,
    )
