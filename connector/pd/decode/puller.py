"""D's side of a hand-over: pull what P holds into blocks of this node, and verify it.

And P's side of the way back, where D holds the turn before: the same claims, plans and reads. Bytes
move on threads of their own, so a slow peer delays neither the engine step nor other requests.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
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
from engine.kv_cache.spec import MambaSpec
from engine.step import BlockLoad, LoadFailure
from engine.types import KVTransferStats

log = structlog.get_logger()


class Puller:
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

    def start(self, loads: Iterable[BlockLoad]) -> None:
        """Hands each load to the pull threads, which serve peers in turn; refused ones fail."""
        for load in loads:
            claim = self._claims.get(load.request_id)
            peer = claim.peer.engine_id if claim and claim.peer else ""
            try:
                self._pool.submit(peer, partial(self._pull, load))
            except OverloadedError as error:
                self._refuse(load, claim, error)

    def take_ended(self) -> tuple[tuple[str, ...], tuple[LoadFailure, ...]]:
        """Request ids of the pulls that succeeded since the last call, and those that failed."""
        loaded: list[str] = []
        failed: list[LoadFailure] = []
        while not self._results.empty():
            request_id, cause = self._results.get_nowait()
            if cause is None:
                loaded.append(request_id)
            else:
                failed.append(LoadFailure(request_id, cause))
        return tuple(loaded), tuple(failed)

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

    def _refuse(self, load: BlockLoad, claim: PrefillClaim | None, error: OverloadedError) -> None:
        """Nobody will read: P hears it now, and the request is computed here or fails."""
        log.warning("a pull was refused", error=str(error))
        if claim is not None:
            self._metrics.failed.inc()
            claim.fail(causes.TOO_MANY_PULLS)
            self._claims.settle(claim)
        self._results.put((load.request_id, causes.TOO_MANY_PULLS))
        self._wake()

    def _pull(self, load: BlockLoad) -> None:
        """On a pull thread: every outcome becomes a result, or a request would wait for ever.

        The engine hears of it first, and P, whose lease ends, after that.
        """
        claim = self._claims.get(load.request_id)
        cause: str | None = causes.TRANSFER_FAILED
        try:
            cause = self._try_pull(claim, load)
        finally:
            self._results.put((load.request_id, cause))
            self._wake()
            if claim is not None:
                self._claims.settle(claim, "read" if cause is None else "given up")

    def _try_pull(self, claim: PrefillClaim | None, load: BlockLoad) -> str | None:
        if claim is None or claim.peer is None or self._stopping.is_set():
            return causes.REQUEST_ENDED
        try:
            self._read_into(claim, claim.peer, load)
        except TandemError as error:
            cause = causes.of_read(error)
            if cause == causes.LATE_READ:
                self._metrics.late_reads.inc()
            self._claims.failed(claim, cause, error)
            return cause
        self._claims.worked(claim)
        return None

    def _read_into(self, claim: PrefillClaim, peer: Peer, load: BlockLoad) -> None:
        started = time.monotonic()
        num_tokens, offsets = claim.num_tokens, claim.offsets(peer)
        spans = plan_pull(
            self._plan,
            blocks_announced(self._plan, peer.groups, offsets, num_tokens=num_tokens),
            load.tables,
            num_tokens=load.num_tokens,
            ranges=load.ranges,
        )
        verified = self._read(claim, peer, spans, holding=holding_of(claim.prompt_digest, offsets))
        seconds = time.monotonic() - started
        self._metrics.pulled(
            seconds,
            spans=len(spans.spans),
            attention_bytes=spans.attention_bytes,
            state_bytes=spans.state_bytes,
        )
        kept = zip(self._plan.groups, load.ranges, strict=True)
        local = [start for group, (start, _) in kept if not isinstance(group.spec, MambaSpec)]
        claim.stats = stats_of(
            claim, spans, min(local, default=0), transfer_ms=1e3 * seconds, verified=verified
        )

    def _read(self, claim: PrefillClaim, peer: Peer, spans: PullPlan, *, holding: bytes) -> bool:
        """After a failed read, or if P does not answer, the next claim repeats the handshake."""
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


def stats_of(
    claim: PrefillClaim,
    spans: PullPlan | None,
    num_local_tokens: int,
    *,
    transfer_ms: float = 0.0,
    verified: bool = False,
) -> KVTransferStats:
    """What a hand-over has moved: `spans`, after `num_local_tokens` that were here already."""
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
