"""Continuous batching: which requests run in the next step, and what their results mean.

Torch-free. Knows that tokens may come from outside (the seam), never from whom. All decisions
that need no state are in `chunk.py`, `start.py` and `request_queue.py`.
"""

from dataclasses import dataclass, field

import msgspec

from engine.config import SchedulerConfig
from engine.errors import KVLoadError, OverloadedError, TandemError
from engine.kv_cache.checkpoints import decode_positions, due
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.spec import MambaSpec
from engine.kv_cache.tables import BlockTables
from engine.kv_connector import FinishDecision, SchedulerConnector
from engine.request import Request, RequestStatus
from engine.sched.chunk import plan_prefill_chunk
from engine.sched.request_queue import RequestQueue
from engine.sched.start import Start, find_start
from engine.sched.stats import NO_CHECKPOINT, SchedulerStats
from engine.step import (
    BlockPull,
    ConnectorOutput,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from engine.types import FinishReason, GenerateOutput, TokenId, TokenLogprob


@dataclass(slots=True, frozen=True)
class StepNews:
    """What one step tells the outside: outputs per request, and errors that end requests."""

    outputs: list[tuple[str, GenerateOutput]] = field(default_factory=list)
    errors: list[tuple[str, TandemError]] = field(default_factory=list)


class Scheduler:
    """Owner of every request from `add` to its end, and of blocks that are held after it."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        connector: SchedulerConnector,
        *,
        recompute_failed_loads: bool = True,
    ) -> None:
        self.config = config
        self.cache = cache
        self.stats = SchedulerStats()
        self._connector = connector
        self._recompute_failed_loads = recompute_failed_loads
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._loading: dict[str, Request] = {}
        self._running: list[Request] = []
        self._held: dict[str, Request] = {}
        self._news = StepNews()
        self._arrivals = 0
        self._without_room: tuple[str, int] | None = None
        self._keeps_states = any(isinstance(g.spec, MambaSpec) for g in cache.plan.groups)

    @property
    def num_running(self) -> int:
        """Requests with blocks: computing or loading."""
        return len(self._running) + len(self._loading)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Finished requests whose blocks a lease keeps."""
        return len(self._held)

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now; loads and leases wake the engine by themselves."""
        return bool(self._running or self._waiting or self._news.outputs or self._news.errors)

    def add(self, request: Request) -> None:
        """Takes a request in. Raises OverloadedError when too many wait.

        A remote prefill brings its first token: it is news at once, and when it ends the request
        nothing is pulled.
        """
        if len(self._waiting) >= self.config.max_num_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests wait already; try again later")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        if request.wants_remote_prefill:
            self._take_first_token(request)
        if not request.is_finished:
            self._waiting.push(request)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it stands, and what holds its blocks; ignores unknown ones."""
        if request_id in self._held:
            self._connector.give_up(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self._waiting.remove(request)
        request.finish_reason = FinishReason.ABORT
        self._finish(request)

    def schedule(self) -> SchedulerOutput:
        """The next step's work: running requests, then waiting ones as budget and room allow."""
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preemptions = self.stats.num_preemptions
        for request in list(self._running):
            if request.status is RequestStatus.RUNNING and budget:
                budget -= self._schedule_running(request, budget, scheduled)
        nobody_lost_blocks = self.stats.num_preemptions == preemptions
        while nobody_lost_blocks and budget and self._may_start_another():
            used = self._schedule_waiting(self._waiting.peek(), budget, scheduled)
            if used is None:
                break
            budget -= used
        return SchedulerOutput(
            tuple(self._without_preempted(scheduled)),
            self.cache.take_new_states(),
            self.cache.copies(),
            self._connector.build_connector_meta(),
        )

    def update(
        self, output: SchedulerOutput, computed: ModelRunnerOutput, transfers: ConnectorOutput
    ) -> StepNews:
        """Books one step's results; returns what the outside must hear."""
        self.cache.copies_done()
        for item in output.scheduled:
            name = item.request.request_id
            if name in computed.failed:
                self.cache.drop_checkpoints(item.checkpoints)
                self._fail(item.request, computed.failed[name])
                continue
            self._book_computed(item)
            if item.samples:
                sample = computed.sampled[name]
                self._take_token(item.request, sample.token_id, sample.logprob)
        self.update_transfers(transfers)
        news, self._news = self._news, StepNews()
        return news

    def update_transfers(self, transfers: ConnectorOutput) -> None:
        """Books what the connector reports: loads done, loads failed, leases that ended."""
        for request_id in transfers.loaded:
            self._load_done(request_id)
        for request_id, cause in transfers.failed.items():
            self._load_failed(request_id, cause)
        for request_id in transfers.released:
            self._free(self._held.pop(request_id))

    def check(self) -> None:
        """Recounts requests and blocks; raises AssertionError on any difference."""
        self.cache.check()
        owners = [*self._running, *self._loading.values(), *self._held.values()]
        assert all(request.blocks is not None for request in owners)
        assert len(self._requests) == len(self._running) + len(self._loading) + len(self._waiting)

    def _without_preempted(self, scheduled: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """What later arrivals in the same step have not pushed out again."""
        for item in scheduled:
            if item.request.status is not RequestStatus.RUNNING:
                self.cache.drop_checkpoints(item.checkpoints)
        return [item for item in scheduled if item.request.status is RequestStatus.RUNNING]

    def _book_computed(self, item: ScheduledRequest) -> None:
        """The bytes of these tokens are complete: they may be found from now on."""
        request = item.request
        assert request.blocks is not None
        self.stats.computed(request, item.num_tokens)
        self.stats.wrote(request, (kept.num_tokens for kept in item.checkpoints))
        request.num_computed_tokens += item.num_tokens
        self.cache.publish(request.blocks, request.prefix, request.num_computed_tokens)
        self.cache.publish_checkpoints(request.blocks, item.checkpoints)

    def _may_start_another(self) -> bool:
        """Whether the first that waits may be looked up: not again before anything was let go."""
        if not self._waiting or self.num_running >= self.config.max_num_seqs:
            return False
        first = self._waiting.peek().request_id, self.cache.num_releases
        return first != self._without_room

    def _schedule_running(
        self, request: Request, budget: int, scheduled: list[ScheduledRequest]
    ) -> int:
        num_tokens = _next_chunk(request, request.num_computed_tokens, budget)
        assert request.blocks is not None
        while not self.cache.grow(request.blocks, request.num_computed_tokens + num_tokens):
            if self._take_back():
                continue
            victim = max(self._running, key=lambda other: (other.priority, other.arrival))
            self._preempt(victim)
            if victim is request:
                return 0
        scheduled.append(self._scheduled(request, num_tokens))
        return num_tokens

    def _schedule_waiting(
        self, request: Request, budget: int, scheduled: list[ScheduledRequest]
    ) -> int | None:
        """Tokens of budget used, or None when the request has to go on waiting."""
        start, tables = self._try_start(request, request.num_tokens - 1, budget)
        while tables is None and self._take_back():
            start, tables = self._try_start(request, request.num_tokens - 1, budget)
        if tables is None and self.cache.num_free_units == self.cache.plan.num_units:
            start, tables = self._try_start(request, 0, budget)  # what it hits takes too many units
        if tables is None:
            self._without_room = request.request_id, self.cache.num_releases
            return None
        self._waiting.pop()
        self._begin(request, tables, start)
        if start.num_external:
            self._start_load(request, start)
            return 0
        if request.skip_mamba_align:
            self._connector.update_state_after_alloc(request, None)
        num_tokens = _next_chunk(request, start.num_tokens, budget)
        request.move(RequestStatus.RUNNING)
        self._running.append(request)
        scheduled.append(self._scheduled(request, num_tokens))
        return num_tokens

    def _try_start(
        self, request: Request, limit: int, budget: int
    ) -> tuple[Start, BlockTables | None]:
        start = find_start(request, limit, cache=self.cache, connector=self._connector)
        num_new = 0 if start.num_external else _next_chunk(request, start.num_tokens, budget)
        return start, self.cache.start(start.hit, start.num_tokens + num_new)

    def _take_back(self) -> bool:
        """Frees what is held for somebody who has not asked for it yet; whether there was any."""
        request_id = self._connector.make_room()
        if request_id is not None:
            self._free(self._held.pop(request_id))
        return request_id is not None

    def _begin(self, request: Request, tables: BlockTables, start: Start) -> None:
        hit, block_size = start.hit, self.cache.plan.joint_block_size
        request.blocks = tables
        request.num_computed_tokens = hit.num_tokens
        request.checkpoints = start.checkpoints(request.num_prompt_tokens, block_size)
        if request.status is not RequestStatus.WAITING:
            return
        request.num_cached_tokens = hit.num_tokens
        if not request.num_known_tokens:  # a failed load comes here again
            self.stats.started(request, hit.num_tokens, start.num_external)
        if start.num_external or not self._keeps_states:
            return
        self.stats.checkpoint_hits += hit.num_tokens > 0
        if hit.branch_point > max(hit.num_tokens, request.num_known_tokens):
            request.lose(hit.branch_point, NO_CHECKPOINT)

    def _scheduled(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        interval = self.config.mamba_decode_checkpoint_interval
        decoded = decode_positions(request.num_prompt_tokens, start, end, interval=interval)
        positions = (*due(request.checkpoints, start, end), *decoded)
        checkpoints = self.cache.reserve_checkpoints(request.prefix, positions)
        return ScheduledRequest(
            request, num_tokens, samples=end == request.num_tokens, checkpoints=checkpoints
        )

    def _preempt(self, request: Request) -> None:
        """Frees everything; the request will be computed again from its first token."""
        self._running.remove(request)
        request.move(RequestStatus.PREEMPTED)
        self._retire(request)
        self.stats.num_preemptions += 1
        request.lose(request.num_computed_tokens, "preemption")
        self._restart(request)

    def _restart(self, request: Request) -> None:
        self._free(request)
        request.num_computed_tokens = 0
        self._waiting.push(request)

    def _start_load(self, request: Request, start: Start) -> None:
        assert request.blocks is not None
        request.num_loading_tokens = start.num_tokens
        request.move(RequestStatus.WAITING_FOR_REMOTE_KVS)
        self._loading[request.request_id] = request
        tables = tuple(tuple(blocks) for blocks in request.blocks.groups)
        pull = BlockPull(request.request_id, tables, request.num_computed_tokens)
        self._connector.update_state_after_alloc(request, pull)

    def _load_done(self, request_id: str) -> None:
        request = self._loading.pop(request_id)
        if request.is_finished:
            self._free(request)
            return
        assert request.blocks is not None
        request.num_computed_tokens = request.num_loading_tokens
        self.cache.keep_loaded(request.blocks, request.prefix, request.num_computed_tokens)
        request.move(RequestStatus.RUNNING)
        self._running.append(request)

    def _load_failed(self, request_id: str, cause: str) -> None:
        request = self._loading.pop(request_id)
        if request.is_finished:
            self._free(request)
            return
        request.skip_mamba_align = False
        if self._recompute_failed_loads:
            request.move(RequestStatus.WAITING)
            request.lose(request.num_loading_tokens, cause)
            self._restart(request)
            return
        self._fail(request, KVLoadError(f"the remote prefill could not be loaded: {cause}"))

    def _take_first_token(self, request: Request) -> None:
        params = request.origin.kv_transfer_params
        assert params is not None and params.first_token_ids is not None
        logprob = params.first_token_logprobs[0] if params.first_token_logprobs else None
        self._take_token(request, params.first_token_ids[0], logprob)

    def _take_token(
        self, request: Request, token_id: TokenId, logprob: TokenLogprob | None
    ) -> None:
        request.append(token_id, logprob)
        news = GenerateOutput(
            token_ids=(token_id,),
            logprobs=(logprob,) if logprob else None,
            num_cached_tokens=request.num_cached_tokens,
        )
        if request.finish_reason is None:
            self._news.outputs.append((request.request_id, news))
            return
        self._finish(request, news)

    def _fail(self, request: Request, error: TandemError) -> None:
        request.finish_reason = FinishReason.ERROR
        self._finish(request)
        self._news.errors.append((request.request_id, error))

    def _finish(self, request: Request, last: GenerateOutput | None = None) -> None:
        """Ends a request: its blocks go, or stay while a lease or a load in flight needs them."""
        del self._requests[request.request_id]
        if request in self._running:
            self._running.remove(request)
            if request.finish_reason is not FinishReason.ERROR:  # its state may be half written
                self._retire(request)
        request.move(RequestStatus.FINISHED)
        decision = self._connector.request_finished(request)
        if decision.hold:
            self._held[request.request_id] = request
            self._without_room = None  # it may be taken back for who waits
        elif request.request_id not in self._loading:
            self._free(request)
        if last is not None:
            self._news.outputs.append((request.request_id, _final(request, last, decision)))

    def _retire(self, request: Request) -> None:
        assert request.blocks is not None
        self.cache.retire(request.blocks, request.prefix, request.num_computed_tokens)

    def _free(self, request: Request) -> None:
        if request.blocks is not None:
            self.cache.free(request.blocks)
            request.blocks = None


def _next_chunk(request: Request, start: int, budget: int) -> int:
    return plan_prefill_chunk(start, request.num_prompt_tokens, request.num_tokens, budget=budget)


def _final(request: Request, last: GenerateOutput, decision: FinishDecision) -> GenerateOutput:
    return msgspec.structs.replace(
        last,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_token,
        kv_transfer_params=decision.kv_transfer_params,
        kv_transfer=decision.kv_transfer,
    )
