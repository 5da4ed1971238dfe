"""The worker side of the PdConnector: pulls what peers hold into blocks of this node, verified.

D pulls a prefill from P, and P the turn before from D: the same plans and reads. Bytes move on
threads of their own, so a slow peer delays neither the engine step nor other requests.
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
from connector.pd.decode.pull_plan import plan_pull
from connector.pd.decode.pull_reader import PullReader, Reading
from connector.pd.decode.remote_prefills import RemotePrefill, RemotePrefills
from connector.pd.layout import blocks_announced
from connector.pd.metrics import TransferMetrics
from connector.pd.prefill.lease_table import LeaseTable
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
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec
from engine.kv_connector import WorkerConnector
from engine.step import BlockLoad, ConnectorOutput, LoadFailure

log = structlog.get_logger()


class PdWorker(WorkerConnector):
    """Owner of the reader and the pull threads; also reports the leases that ended.

    Peers read what this node holds one-sidedly: for that there is nothing to do here.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        reader: PullReader,
        remote: RemotePrefills,
        *,
        leases: LeaseTable,
        metrics: TransferMetrics,
        config: PdConnectorConfig,
        wake: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._reader = reader
        self._remote = remote
        self._leases = leases
        self._metrics = metrics
        self._timeout_s = config.transfer_timeout
        self._wake = wake
        # Of each load: request, cause if it failed, the first tokens filled in.
        self._results = queue.SimpleQueue[tuple[str, str | None, tuple[int, ...]]]()
        limits = PoolLimits(
            total=config.max_concurrent_pulls,
            per_peer=config.pulls_per_peer,
            waiting=config.max_waiting_pulls,
        )
        self._pool = FairPool(limits, "kv-pull")
        self._stopping = threading.Event()

    def start_load(self, message: Iterable[BlockLoad]) -> None:
        """Hands each load to the pull threads, which serve peers in turn; refused ones fail."""
        for load in message:
            prefill = self._remote.get(load.request_id)
            peer = prefill.peer.engine_id if prefill and prefill.peer else ""
            try:
                self._pool.submit(peer, partial(self._pull, load))
            except OverloadedError as error:
                log.warning("a pull was refused", error=str(error))
                if prefill is not None:
                    self._metrics.failed.inc()
                    prefill.fail(causes.TOO_MANY_PULLS)
                    self._remote.settle(prefill)
                self._report(load, causes.TOO_MANY_PULLS)

    def get_finished(self) -> ConnectorOutput:
        """Pulls that ended, and requests whose lease was released or ran out."""
        loaded: list[str] = []
        failed: list[LoadFailure] = []
        starts: dict[str, tuple[int, ...]] = {}
        while not self._results.empty():
            request_id, cause, filled_from = self._results.get_nowait()
            if cause is None:
                loaded.append(request_id)
                if any(filled_from):
                    starts[request_id] = filled_from
            else:
                failed.append(LoadFailure(request_id, cause))
        return ConnectorOutput(
            tuple(loaded), tuple(failed), released=self._leases.take_ended(), filled_from=starts
        )

    def next_deadline(self) -> float | None:
        """When the earliest lease runs out; a finished pull wakes the engine by itself."""
        return self._leases.next_deadline()

    def close(self) -> None:
        """Waits for pulls in flight (each is bounded) and stops the threads; no other begins."""
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

    def _pull(self, load: BlockLoad) -> None:
        """On a pull thread: every outcome is reported, or the request would wait for ever."""
        prefill = self._remote.get(load.request_id)
        lost = None if prefill is None else prefill.failure
        if prefill is None or prefill.peer is None or lost or self._stopping.is_set():
            self._report(load, lost or causes.REQUEST_ENDED)
            if prefill is not None:
                self._remote.settle(prefill)
            return
        cause: str | None = causes.TRANSFER_FAILED
        filled_from: tuple[int, ...] = ()
        try:
            filled_from = self._read(prefill, prefill.peer, load)
            self._remote.worked(prefill)
            cause = None
        except TandemError as error:
            cause = causes.of_read(error)
            if cause == causes.LATE_READ:
                self._metrics.late_reads.inc()
            self._remote.failed(prefill, cause, error)
        finally:
            # The engine hears of it first; the message that ends P's lease delays nobody.
            self._report(load, cause, filled_from)
            self._remote.settle(prefill, "read" if cause is None else "given up")

    def _report(self, load: BlockLoad, cause: str | None, starts: tuple[int, ...] = ()) -> None:
        self._results.put((load.request_id, cause, starts))
        self._wake()

    def _read(self, prefill: RemotePrefill, peer: Peer, load: BlockLoad) -> tuple[int, ...]:
        """Reads one pull: the first token it filled in, by KV cache group. Raises a TandemError."""
        started, block_ids = time.monotonic(), prefill.block_ids
        if block_ids is None:
            raise LateReadError(
                f"{peer.engine_id} no longer held {prefill.remote_request_id} when asked"
            )
        held = blocks_announced(
            self._plan,
            peer.groups,
            block_ids,
            num_tokens=prefill.num_tokens,
            filled_from=prefill.params.remote_filled_from,
        )
        plan = plan_pull(
            self._plan, held, load.tables, num_tokens=load.num_tokens, ranges=load.ranges
        )
        # Admission has compared this digest with the request's own tokens. So what P's record says
        # it holds must be this request's prompt, in the very blocks that are read.
        reading = Reading(
            peer,
            prefill.remote_request_id,
            prefill.generation,
            holding_of(prefill.params.remote_prompt_digest or "", block_ids),
            deadline=time.monotonic() + self._timeout_s,
        )
        try:
            verified = self._reader.read(reading, plan)
        except (LateReadError, OtherPromptError, VerificationError):
            raise
        except (TransportError, UnavailableError, DeadlineExceededError):
            self._remote.forget(peer)
            raise
        seconds = time.monotonic() - started
        self._metrics.pulled(
            seconds,
            spans=len(plan.spans),
            attention_bytes=plan.attention_bytes,
            state_bytes=plan.state_bytes,
        )
        groups = zip(self._plan.groups, load.ranges, strict=True)
        local = [start for group, (start, _) in groups if not isinstance(group.spec, MambaSpec)]
        prefill.set_stats(min(local, default=0), plan, seconds=seconds, verified=verified)
        return plan.filled_from
