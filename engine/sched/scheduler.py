"""Continuous batching: chooses the requests of each step and acts on their results.

Torch-free. Knows that tokens may come from outside (the seam), never from whom."""

import heapq
from collections import deque
from dataclasses import dataclass

import msgspec

from engine.errors import KVLoadError, OverloadedError, TandemError, UnavailableError
from engine.kv_cache.checkpoints import decode_positions, due
from engine.kv_cache.manager import KVCacheManager, Pin
from engine.kv_cache.tables import BlockTables
from engine.kv_connector import FirstToken, SchedulerConnector
from engine.request import Request, RequestStatus
from engine.sched.planning import Load, Planned, Start, find_start, plan_prefill_chunk
from engine.sched.stats import NO_CHECKPOINT, SchedulerStats
from engine.step import ConnectorOutput, LoadFailure, ModelRunnerOutput, SchedulerOutput, StepNews
from engine.types import FinishReason, GenerateOutput, SchedulingPolicy, TokenId, TokenLogprob

MAX_WAITING = 1024


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """A node's options that the scheduler reads; flags of the same names explain them."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    scheduling_policy: SchedulingPolicy = "fcfs"
    mamba_decode_checkpoint_interval: int = 0
    recompute_failed_loads: bool = True


class RequestQueue:
    """A heap in the order of vLLM's priority policy; equal priorities: first come, first served."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Adds a request; a preempted one keeps its arrival number, and so its place."""
        heapq.heappush(self._heap, (request.priority, request.arrival, request))

    def peek(self) -> Request:
        """The next request, which stays."""
        return self._heap[0][2]

    def pop(self) -> Request:
        """Takes the next request."""
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request) -> None:
        """Removes one request from anywhere in the queue; linear in its length."""
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapq.heapify(self._heap)


class Scheduler:
    """Owner of every request from `add` to its end, and of blocks held after the end."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        connector: SchedulerConnector,
    ) -> None:
        self.config = config
        self.cache = cache
        self.stats = SchedulerStats()
        self._connector = connector
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        # These wait for the connector's answer or for a mask, and not for room.
        self._unresolved: list[Request] = []
        self.loads: dict[str, Load] = {}  # also of requests that have ended meanwhile
        self._running: list[Request] = []
        self.holds: dict[str, Request] = {}  # finished, and kept until `num_holds` is 0
        self._saving: dict[str, Pin] = {}
        self._planned: list[Planned] = []  # of the step that is being planned
        # Of steps whose results are not here yet: one, or two when one runs ahead.
        self._in_flight: deque[list[Planned]] = deque()
        self._news = StepNews()
        self._arrivals = 0
        # The first in line that found no room, and the number of releases then: it is not looked
        # up again before that number moves.
        self._without_room: tuple[str, int] | None = None

    @property
    def num_running(self) -> int:
        """Requests with blocks: computing or loading."""
        return len(self._running) + len(self.loads)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that no step has computed yet and no load brings; from any thread."""
        return sum(one.num_missing_prompt_tokens for one in self._requests.copy().values())

    @property
    def num_held(self) -> int:
        return len(self.holds)

    @property
    def has_work(self) -> bool:
        """True if a step could do something now; loads and leases wake the engine by themselves."""
        news = self._news.outputs or self._news.errors
        return bool(self._running or self._waiting or self._in_flight or news)

    def add(self, request: Request, first_token: FirstToken | None = None) -> None:
        """Queues a request. Raises OverloadedError when too many wait.

        A first token that is known already is emitted at once; if it ends the request, nothing is
        loaded.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise OverloadedError(f"{len(self._waiting)} requests wait already; try again later")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        # Prompt log-probabilities come with the first token, so such a prompt is computed here.
        if first_token is not None and request.sampling.prompt_logprobs is None:
            self._take_token(request, first_token.token_id, first_token.logprob)
        if not request.is_finished:
            self._waiting.push(request)

    def abort(self, request_id: str) -> None:
        """Ends a request in any status, and the hold on its blocks; ignores unknown ids."""
        if request_id in self.holds:
            self._connector.end_hold(request_id)
        if (request := self._requests.get(request_id)) is None:
            return
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self._waiting.remove(request)
        request.finish_reason = FinishReason.ABORT
        self._finish(request)

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached in the arena; between two steps.

        Raises UnavailableError, and forgets nothing, while requests, peers or saves use some of it.
        """
        if self.cache.usage:
            raise UnavailableError(
                f"the prefix cache is in use: {self.num_running} requests run, {self.num_held} "
                f"finished ones are kept for other nodes, {len(self._saving)} saves read it; try "
                "again once they have ended"
            )
        self.cache.reset()
        self._connector.forget_evicted()

    def wait_for_masks(self, seconds: float) -> None:
        """Returns once all requests that run know which tokens may come next, or after `seconds`.

        Those that are slow are not waited for: they join the step in which they know.
        """
        matchers = [request.matcher for request in self._running if request.matcher is not None]
        missing = [one for one in matchers if one.is_waiting and not one.is_slow]
        if missing:
            missing[0].news.wait(missing, seconds)

    def schedule(self) -> SchedulerOutput:
        """The next step's work: running requests, then waiting ones as budget and room allow."""
        budget = self.config.max_num_batched_tokens
        preemptions = self.stats.num_preemptions
        for request in list(self._running):  # a copy: a preemption removes some
            if request.status is RequestStatus.RUNNING and budget:
                budget -= self._schedule_running(request, budget)
        # Nobody starts in a step that preempted: it would take the room that was just made.
        nobody_lost_blocks = self.stats.num_preemptions == preemptions
        while nobody_lost_blocks and budget and self._may_start_another():
            if (used := self._schedule_waiting(self._waiting.peek(), budget)) is None:
                break
            budget -= used
        while self._unresolved:
            self._waiting.push(self._unresolved.pop())
        return self._hand_out()

    def schedule_ahead(self) -> SchedulerOutput | None:
        """The step after the one in flight, before its tokens are known; None where it must wait.

        Each request of the step in flight decodes once more, but for those that end with it. So
        nobody may join, all others must go on, and the blocks that they need must be free: then the
        next plan cannot be another one, but for requests that end by a token of their stops.
        """
        (in_flight,) = self._in_flight
        alive = [item for item in in_flight if not item.request.is_finished]
        following = [item for item in alive if not item.is_last]
        if not following or len(alive) != len(self._running) or self.cache.copies():
            return None
        if self._may_start_another() or not all(map(self._goes_on, following)):
            return None
        for item in following:
            # What was taken before one finds no room is used by the step that is planned instead.
            assert item.request.blocks is not None
            if not self.cache.grow(item.request.blocks, item.end + 1):
                return None
        for item in following:
            self._plan(item.request, item.end, 1)
        return self._hand_out()

    def _hand_out(self) -> SchedulerOutput:
        """The worker's view of what is planned, which is in flight from now on."""
        planned, self._planned = self._planned, []
        # Only now: states that are kept for reuse take no room from requests of this step.
        for item in planned:
            prefix = item.request.prefix
            item.checkpoints = self.cache.reserve_checkpoints(prefix, item.positions)
        scheduled = tuple([item.worker_input() for item in planned])
        self._in_flight.append(planned)
        # After the last block was reserved: the connector hears what this step evicts.
        meta = self._connector.build_meta(scheduled)
        for save in meta.saves:
            self._saving[save.save_id] = self.cache.pin(save.blocks)
        new_states, copies = self.cache.states.take_new(), self.cache.copies()
        return SchedulerOutput(scheduled, new_states, copies, meta.message)

    def update(self, computed: ModelRunnerOutput, transfers: ConnectorOutput) -> StepNews:
        """Takes the results of the earliest step in flight; returns the news for callers."""
        self.cache.copies_done()  # the sources of copies may be evicted from now on
        for item in self._in_flight.popleft():
            request, name = item.request, item.request.request_id
            if request.is_finished:  # by the token before; the worker wrote nothing for it
                self.cache.states.drop(item.checkpoints)
                continue
            if name in computed.failed:
                self.cache.states.drop(item.checkpoints)
                self._fail(request, computed.failed[name])
                continue
            self._publish_computed(item)
            if (found := computed.prompt_logprobs.get(name)) is not None:
                request.prompt_logprobs.append(found)
            # A chunk that ends before the last known token chooses none.
            if request.num_computed_tokens == len(request.token_ids):
                sample = computed.sampled[name]
                self._take_token(request, sample.token_id, sample.logprob)
        self.update_transfers(transfers)
        news, self._news = self._news, StepNews()
        return news

    def update_transfers(self, transfers: ConnectorOutput) -> None:
        """Acts on the connector's report: loads, saves and holds that ended."""
        self._connector.update(transfers)
        for request_id, filled_from in transfers.filled_from.items():
            self.loads[request_id].filled_from = filled_from
        for request_id in transfers.loaded:
            self._load_ended(request_id)
        for failure in transfers.failed:
            self._load_ended(failure.request_id, failure)
        for request_id in transfers.released:
            self._release(request_id)
        for save_id in transfers.saved:
            self.cache.unpin(self._saving.pop(save_id))

    def _publish_computed(self, item: Planned) -> None:
        """Publishes tokens whose bytes are complete now: other requests may hit them."""
        request = item.request
        assert request.blocks is not None
        self.stats.computed(request, item.num_tokens)
        request.num_computed_tokens += item.num_tokens
        self.cache.publish(request.blocks, request.prefix, request.num_computed_tokens)
        if item.checkpoints:
            self.stats.wrote(request, [kept.num_tokens for kept in item.checkpoints])
            self.cache.publish_checkpoints(request.blocks, item.checkpoints)

    def _goes_on(self, item: Planned) -> bool:
        """True if the step after the one in flight may be planned before that one's token is known.

        A state to keep is known by the tokens before it, so the step that makes one has to wait.
        """
        interval = self.config.mamba_decode_checkpoint_interval
        return item.goes_on and not (interval and (item.end + 1) % interval == 0)

    def _may_start_another(self) -> bool:
        """True if the first waiting request may try to start; see `_without_room`."""
        if not self._waiting or self.num_running >= self.config.max_num_seqs:
            return False
        first = self._waiting.peek().request_id, self.cache.pool.num_releases
        return first != self._without_room

    def _schedule_running(self, request: Request, budget: int) -> int:
        if request.waits_for_mask or self._is_refused(request):
            return 0
        num_tokens = _next_chunk(request, request.num_computed_tokens, budget)
        assert request.blocks is not None
        # Held blocks that no peer has claimed go first; then the latest of the least urgent
        # requests, which may be this one. One request alone always fits (`serving.node.limits`).
        while not self.cache.grow(request.blocks, request.num_computed_tokens + num_tokens):
            if self._end_a_hold():
                continue
            victim = max(self._running, key=lambda other: (other.priority, other.arrival))
            self._preempt(victim)
            if victim is request:
                return 0
        self._plan(request, request.num_computed_tokens, num_tokens)
        return num_tokens

    def _schedule_waiting(self, request: Request, budget: int) -> int | None:
        """Tokens of budget used, or None when the request has to wait for room."""
        if request.waits_for_mask:
            self._waiting.pop()
            self._unresolved.append(request)
            return 0
        if self._is_refused(request):
            return 0
        start, tables = self._try_start(request, budget)
        while start and not tables and self._end_a_hold():
            start, tables = self._try_start(request, budget)
        if start and not tables and self.cache.usage == 0:
            # The arena is empty and still too small: a hit takes more units than its tokens alone
            # would, since its blocks may be scattered over many. So start without one.
            start, tables = self._try_start(request, budget, reuse=False)
        if start is None:
            self._waiting.pop()
            self._unresolved.append(request)
            return 0
        if tables is None:
            self._without_room = request.request_id, self.cache.pool.num_releases
            return None
        self._waiting.pop()
        self._begin(request, tables, start)
        if start.needs_load:
            request.num_loading_tokens = start.hit.num_tokens
            request.move(RequestStatus.WAITING_FOR_REMOTE_KVS)
            load = start.block_load(request.request_id, tables)
            num_parts = self._connector.start_load(request, load)
            self.loads[request.request_id] = Load(request, num_parts)
            return 0
        if start.match is not None:
            if start.match.lost is not None:
                request.lose(*start.match.lost)
            self._connector.start_load(request, None)
        num_tokens = _next_chunk(request, request.num_computed_tokens, budget)
        request.move(RequestStatus.RUNNING)
        self._running.append(request)
        self._plan(request, request.num_computed_tokens, num_tokens)
        return num_tokens

    def _is_refused(self, request: Request) -> bool:
        """Ends a request that its grammar does not let go on; True if it did."""
        if request.matcher is None or request.matcher.error is None:
            return False
        if request.status is not RequestStatus.RUNNING:
            self._waiting.remove(request)
        self._fail(request, request.matcher.error)
        return True

    def _try_start(
        self, request: Request, budget: int, *, reuse: bool = True
    ) -> tuple[Start | None, BlockTables | None]:
        start = find_start(request, cache=self.cache, connector=self._connector, reuse=reuse)
        if start is None:
            return None, None
        num_tokens = start.hit.num_tokens
        if not start.needs_load:
            num_tokens += _next_chunk(request, num_tokens, budget)
        return start, self.cache.start(start.hit, num_tokens)

    def _end_a_hold(self) -> bool:
        """Frees the least needed held blocks that no peer has claimed; False if there are none."""
        if (request_id := self._connector.end_hold(None)) is not None:
            self._release(request_id)
        return request_id is not None

    def _release(self, request_id: str) -> None:
        """Ends one hold on a finished request; frees its blocks after the last one."""
        request = self.holds[request_id]
        request.num_holds -= 1
        if not request.num_holds:
            del self.holds[request_id]
            self._free(request)

    def _begin(self, request: Request, tables: BlockTables, start: Start) -> None:
        request.blocks = tables
        request.num_computed_tokens = num_here = start.num_computed_tokens
        request.num_local_tokens, request.num_loading_tokens = num_here, 0
        self.cache.plan_checkpoints(
            tables, start.hit, request.num_prompt_tokens, hints=request.cache_boundaries
        )
        if request.status is not RequestStatus.WAITING:
            return
        request.num_cached_tokens = start.num_cached_tokens
        if not request.num_known_tokens:  # a failed load comes here again
            num_external = start.hit.num_tokens - num_here if start.match else None
            self.stats.started(request, num_here, num_external)
            attention = min(start.hit.branch_point, request.num_prompt_tokens)
            request.num_lost_to_state = max(0, attention - start.hit.num_tokens)
            self.stats.tokens_lost_to_state += request.num_lost_to_state
        if start.needs_load or not self.cache.plan.state_groups:
            return
        self.stats.checkpoint_hits += num_here > 0
        if start.hit.branch_point > max(num_here, request.num_known_tokens):
            request.lose(start.hit.branch_point, NO_CHECKPOINT)

    def _plan(self, request: Request, start: int, num_tokens: int) -> None:
        end = start + num_tokens
        if start < request.num_prompt_tokens:  # a chunk never crosses the end of the prompt
            assert request.blocks is not None
            positions = due(request.blocks.checkpoints, start, end)
        else:
            interval = self.config.mamba_decode_checkpoint_interval
            positions = decode_positions(request.num_prompt_tokens, start, end, interval=interval)
        self._planned.append(Planned(request, start, num_tokens, positions))

    def _preempt(self, request: Request) -> None:
        """Frees all blocks; the request starts again, from whatever prefix is cached then."""
        self._running.remove(request)
        # Planned before this step ran out of room.
        self._planned = [item for item in self._planned if item.request is not request]
        request.move(RequestStatus.PREEMPTED)
        self._retire(request)
        self.stats.num_preemptions += 1
        request.lose(request.num_computed_tokens, "preemption")
        self._restart(request)

    def _restart(self, request: Request) -> None:
        self._free(request)
        request.num_computed_tokens = 0
        self._waiting.push(request)

    def _load_ended(self, request_id: str, failure: LoadFailure | None = None) -> None:
        """Counts the end of one part of a load; acts when the last part has ended."""
        load = self.loads[request_id]
        load.end_part(failure)
        if load.num_open:
            return
        del self.loads[request_id]
        if load.request.is_finished:
            self._free(load.request)
        elif load.failures:
            self._load_failed(load)
        else:
            self._load_done(load)

    def _load_done(self, load: Load) -> None:
        request = load.request
        assert request.blocks is not None
        request.num_computed_tokens = request.num_loading_tokens
        self.cache.keep_loaded(
            request.blocks,
            request.prefix,
            request.num_computed_tokens,
            filled_from=load.filled_from,
        )
        request.move(RequestStatus.RUNNING)
        self._running.append(request)

    def _load_failed(self, load: Load) -> None:
        """Publishes the tokens before the first bad one, and computes or loads the rest again.

        With the policy `fail` the request ends with KVLoadError.
        """
        request, cause = load.request, load.failures[0].cause
        if not self.config.recompute_failed_loads:
            self._fail(request, KVLoadError(f"the remote prefill could not be loaded: {cause}"))
            return
        assert request.blocks is not None
        good, loaded = load.num_good_tokens(self.cache.plan), request.num_loading_tokens
        if good > request.num_computed_tokens:
            self.cache.keep_good(
                request.blocks,
                request.prefix,
                good,
                num_loaded=loaded,
                filled_from=load.filled_from,
            )
        request.num_failed_loads += 1
        request.move(RequestStatus.WAITING)
        request.lose(loaded, cause)
        self._restart(request)

    def _take_token(
        self, request: Request, token_id: TokenId, logprob: TokenLogprob | None
    ) -> None:
        news = request.append(token_id, logprob)
        if request.finish_reason is None:
            self._news.outputs.append((request.request_id, news))
            return
        self._finish(request, news)

    def _fail(self, request: Request, error: TandemError) -> None:
        request.finish_reason = FinishReason.ERROR
        self._finish(request)
        self._news.errors.append((request.request_id, error))

    def _finish(self, request: Request, last: GenerateOutput | None = None) -> None:
        """Ends a request; its blocks stay while a hold or a load in flight needs them."""
        del self._requests[request.request_id]
        if request in self._running:
            self._running.remove(request)
            if request.finish_reason is not FinishReason.ERROR:  # its state may be half written
                self._retire(request)
        request.move(RequestStatus.FINISHED)
        decision = self._connector.request_finished(request)
        if decision.num_holds:
            request.num_holds = decision.num_holds
            self.holds[request.request_id] = request
            self._without_room = None  # a waiting request may end this hold to get room
        elif request.request_id not in self.loads:
            self._free(request)
        if last is not None:
            output = msgspec.structs.replace(
                last,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_token,
                kv_transfer_params=decision.kv_transfer_params,
                kv_transfer=decision.kv_transfer,
                queue_s=request.queue_s,
            )
            self._news.outputs.append((request.request_id, output))

    def _retire(self, request: Request) -> None:
        assert request.blocks is not None
        self.cache.retire(request.blocks, request.prefix, request.num_computed_tokens)

    def _free(self, request: Request) -> None:
        if request.blocks is not None:
            self.cache.free(request.blocks)
            request.blocks = None


def _next_chunk(request: Request, start: int, budget: int) -> int:
    return plan_prefill_chunk(start, request.num_prompt_tokens, request.num_tokens, budget=budget)
