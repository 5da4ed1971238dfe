"""One request through the cluster: prefill on P, decode on D, and on other nodes if these fail.

Knows nothing of HTTP and text. A `Router` chooses the nodes.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import structlog
from msgspec import structs

from engine.errors import (
    DeadlineExceededError,
    KVTransferParamsError,
    OverloadedError,
    RequestAbortedError,
    TandemError,
    UnavailableError,
    is_client_fault,
)
from engine.types import FinishReason, GenerateOutput, GenerateRequest, RequestOrigin
from proxy.backends.worker import Call, PrefillFailedError
from proxy.cluster.node import Node, NodeKind
from proxy.cluster.node_pool import NodePool
from proxy.cluster.pairs import Pairs
from proxy.errors import (
    NoDecodeNodeError,
    NoPrefillNodeError,
    as_client_sees_it,
    is_final,
    outcome_of,
)
from proxy.metrics import ProxyMetrics
from proxy.node_choice import NodeChoice, routing_details
from proxy.request_state import Prefilled, RequestState
from proxy.routing.router import Router
from serving.rpc.client import StreamDeadlines
from serving.telemetry.request_records import RequestRecords

log = structlog.get_logger()

SHUTTING_DOWN: Final = "the proxy is shutting down"
MAX_PREFILL_NODES: Final = 2


class PdFlow:
    """The proxy's `Generator`. `pool` owns the nodes; `router` chooses among them.

    `tells_routes`: last outputs say which nodes served. `num_open` counts the requests under way.
    """

    def __init__(
        self,
        pool: NodePool,
        router: Router,
        deadlines: StreamDeadlines,
        *,
        metrics: ProxyMetrics,
        records: RequestRecords,
        tells_routes: bool = False,
    ) -> None:
        self._pool = pool
        self._router = router
        self._tells_routes = tells_routes
        self._deadlines = deadlines
        self._metrics = metrics
        self._records = records
        self._pairs = Pairs(pool)
        self._choice = NodeChoice(pool, router, self._pairs, metrics=metrics)
        self.num_open = 0
        self._refuses_new = False
        self._is_over = False

    def refuse_new(self) -> None:
        """Refuses new requests and fails /ready from now on; requests under way continue."""
        self._refuses_new = True

    def end_open(self) -> None:
        """Ends the requests under way with an error that their clients see."""
        self._refuses_new = self._is_over = True
        self._pool.cut_off()

    async def check_health(self) -> None:
        """Always succeeds: the proxy itself holds nothing that could die."""

    async def check_ready(self) -> tuple[str, ...]:
        if self._refuses_new:
            raise UnavailableError(SHUTTING_DOWN)
        decode = self._pool.available(NodeKind.DECODE)
        if not decode:
            raise NoDecodeNodeError
        if decode[0].worker.needs_prefill and not self._pool.num_available(NodeKind.PREFILL):
            raise NoPrefillNodeError
        return self._pairs.reasons()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """D's outputs, with P's count of cached tokens; `aclose` cancels on the node at work.

        If D fails, the request goes on after the last token on another D, prefilled anew, or waits
        up to `next_output_s` for one that was out of use, such as a D that restarts. Raises
        `UnavailableError` when none is usable, and the client's own errors unchanged. An engine
        that failed at the request is the last that gets it.
        """
        if self._refuses_new:
            raise UnavailableError(SHUTTING_DOWN)
        with self._records.recording(request) as record:
            deadline = asyncio.get_running_loop().time() + self._deadlines.total_s
            state = RequestState(request, deadline, record)
            while True:
                # An error that leaves the block calls for another attempt: the loop goes round.
                async with self._attempt(state):
                    decode = await self._prefill(state)
                    prefilled = state.prefilled
                    state.model_identity = decode.info.model_identity
                    if prefilled is not None and prefilled.hand_over is None:
                        yield self._passed_on(prefilled.output, state)
                        return
                    async with self._decoding(decode, state) as outputs:
                        output = _checked(await anext(outputs), decode, state)
                        state.prompt.drop_digests()
                        if prefilled is not None:
                            self._accept(prefilled, decode, output, state=state)
                        while output.finish_reason is None:
                            yield self._passed_on(output, state)
                            output = _checked(await anext(outputs), decode, state)
                    # D has ended the request before the client reads its last output.
                    self._choice.count_decode_hit(output, state)
                    yield self._passed_on(output, state)
                    return

    @asynccontextmanager
    async def _attempt(self, state: RequestState) -> AsyncIterator[None]:
        """Swallows an error if another attempt may succeed, else raises what the client is told.

        Releases the prefill of an attempt that fails, or that ends before D's first token.
        """
        state.begin_attempt()
        self.num_open += 1
        try:
            yield
        except TandemError as failure:
            error = failure.cause if isinstance(failure, PrefillFailedError) else failure
            state.release_prefill()
            if not await self._may_go_on(state, error):
                raise as_client_sees_it(error, len(state.sent)) from error
        finally:
            self.num_open -= 1
            if not state.num_new:
                state.release_prefill()

    async def _may_go_on(self, state: RequestState, error: TandemError) -> bool:
        """True if another attempt may succeed; logs and counts what becomes of a broken stream."""
        may_go_on = state.may_go_on(error) and await self._has_nodes(state)
        # A continuation that fails before its first token is no second break, but may be the end.
        if state.num_new or (state.sent and not may_go_on):
            self._metrics.broken_streams.labels("continued" if may_go_on else "ended").inc()
            log.warning(
                "a stream goes on on another node" if may_go_on else "a stream ends with an error",
                request_id=state.request.request_id,
                num_tokens=len(state.sent),
            )
        return may_go_on

    async def _has_nodes(self, state: RequestState) -> bool:
        """True once a D may serve the request, and a P that it needs.

        An answer that has begun waits for one to come back. A node in use that may not have the
        request is not waited for: only a restart makes it another.
        """
        clock = asyncio.get_running_loop().time
        end = min(clock() + self._deadlines.next_output_s, state.deadline)
        while not self._is_over:
            if (missing := self._choice.missing(state)) is None:
                return True
            remaining_s = end - clock()
            if not state.sent or remaining_s <= 0 or not self._pool.may_get(missing):
                return False
            await self._pool.wait_for_news(remaining_s)
        return False

    async def _prefill(self, state: RequestState) -> Node:
        """Chooses the nodes, lets P prefill into `state.prefilled`, and returns D.

        A second P gets the request if the first fails; if that fails too, D computes the prompt.
        Raises `UnavailableError` without a usable D, before any P computes in vain.
        """
        for num_left in reversed(range(MAX_PREFILL_NODES + 1)):
            await self._router.refresh(state.prompt)
            if self._is_over:
                raise NoDecodeNodeError
            use_prefill = state.use_prefill and num_left > 0
            decode, node = self._choice.choose(state, use_prefill=use_prefill)
            if node is None:
                break
            try:
                # D counts from its choice on, or else a burst would choose the same one.
                with decode.carrying(), self._router.expecting(state.prompt, decode.view):
                    state.prefilled = await self._prefill_on(node, state)
                if state.prefilled.part is None:
                    self._choice.count_prefill_hit(state)
                break
            except TandemError as error:
                # A prompt that is wrong for P, longer than its context say, may be right for D.
                state.use_prefill = not is_client_fault(error)
                is_wrong = decode.worker.needs_prefill and not state.use_prefill
                if is_final(error) or is_wrong or state.is_lost_too_often:
                    raise
        prefilled = state.prefilled
        is_needed = prefilled is None or prefilled.hand_over is not None
        if prefilled is not None and is_needed and not decode.is_available:
            # D has left while P computed: it would refuse, and P have computed in vain.
            return self._choice.choose_decode(state, prefilled.node)
        return decode

    async def _prefill_on(self, node: Node, state: RequestState) -> Prefilled:
        request = state.request
        try:
            with ExitStack() as part:
                call, origin = part.enter_context(self._running(node, state))
                asked = structs.replace(request, origin=origin)
                prefill = await node.worker.prefill(asked, call)
                remote = None if prefill.hand_over is None else prefill.hand_over.prefill
                if remote is None:
                    return Prefilled(node, _checked(prefill.output, node, state), prefill.hand_over)
                going_on = Prefilled(node, prefill.output, prefill.hand_over, part.pop_all())
                # Called before whoever waits for it: P has its blame when another try begins.
                remote.add_done_callback(partial(_end_part, going_on))
                return going_on
        except (asyncio.CancelledError, DeadlineExceededError):
            # P may finish the prefill, and nobody has heard P's id of it. P knows ours too.
            node.release(node.info.engine_id, request.request_id)
            raise

    @asynccontextmanager
    async def _decoding(
        self, node: Node, state: RequestState
    ) -> AsyncIterator[AsyncGenerator[GenerateOutput]]:
        """D's outputs of the request, until the block ends."""
        held = None if state.prefilled is None else state.prefilled.hand_over
        with self._running(node, state) as (call, origin):
            asked = structs.replace(state.decode_request(), origin=origin)
            async with aclosing(node.worker.generate(asked, call, held)) as outputs:
                yield outputs

    def _accept(
        self, prefilled: Prefilled, decode: Node, output: GenerateOutput, *, state: RequestState
    ) -> None:
        """D has taken what P prefilled: `output` is its first."""
        self._pairs.accepted(prefilled.node, decode)
        if prefilled.part is not None:
            prefilled.node.on_sign_of_life()
            prefilled.end_part(None)
            state.prefilled = replace(prefilled, output=output)
            self._choice.count_prefill_hit(state)

    @contextmanager
    def _running(self, node: Node, state: RequestState) -> Iterator[tuple[Call, RequestOrigin]]:
        """One call to `node` until the block ends, with the node's load, health and metric."""
        deadlines = replace(self._deadlines, total_s=state.remaining_s())
        outcome, engine_id = "cancelled", node.info.engine_id
        node.begin()
        try:
            expecting = self._router.expecting(state.prompt, node.view)
            reason = "" if state.route is None else state.route.reason
            visiting = state.record.visiting(
                node.kind, node.name, reason=reason, outcome_of=outcome_of
            )
            with node.carrying(state.num_uncached(node)), expecting, visiting as visit:
                # The node learns the span that its own belong to, and not who asks.
                origin = RequestOrigin(traceparent=visit.traceparent)
                yield Call(deadlines, state.prompt_on_wire(node.worker)), origin
            outcome = "ok"
            node.end(None)
        except (GeneratorExit, asyncio.CancelledError):
            # A stop string, or a client that has read enough, ends a good answer.
            if state.num_new:
                node.end(None)
            raise
        except TandemError as error:
            outcome = outcome_of(error)
            self._note_failure(node, state, error, engine_id=engine_id)
            raise
        finally:
            labels = (self._router.policy_name, node.kind, node.label, outcome)
            self._metrics.node_requests.labels(*labels).inc()

    def _note_failure(
        self, node: Node, state: RequestState, error: TandemError, *, engine_id: str
    ) -> None:
        """Decides what `error` means for `node`, then `engine_id`, and for the next attempt."""
        prefilled = state.prefilled
        if prefilled is not None and isinstance(error, PrefillFailedError):
            # D only waited for P, whose failure it is.
            node.end(error)
            prefilled.end_part(error.cause)
            state.num_attempts -= state.num_prefills_lost == 0
            state.num_prefills_lost += 1
            return
        if isinstance(error, UnavailableError):
            node.set_problem(str(error))
        if not state.is_late:
            node.end(error)
        if prefilled is not None and isinstance(error, KVTransferParamsError):
            # D refuses only what P computed, so D may get the request again, without a prefill.
            self._pairs.refused(prefilled.node, node, error)
            state.use_prefill = False
            state.num_attempts -= 1
        else:
            state.note_failure(engine_id, error)
        # Clients are not told which node failed and why. A flood of refusals is not logged.
        if not is_client_fault(error) and not isinstance(error, OverloadedError):
            request_id = state.request.request_id
            log.warning(
                "node failed a request", node=node.name, request_id=request_id, problem=str(error)
            )

    def _passed_on(self, output: GenerateOutput, state: RequestState) -> GenerateOutput:
        """`output` as the client gets it, counted and timed."""
        if state.prefilled is not None and not state.sent:
            told = state.prefilled.output.prompt_logprobs
            output = structs.replace(output, prompt_logprobs=told)
        if state.num_cached_tokens is None:
            # D's cache hits are blocks that P has computed again: clients are told P's. And those
            # of a continuation are what the same request has computed before.
            first = output if state.prefilled is None else state.prefilled.output
            state.num_cached_tokens = first.num_cached_tokens
            state.num_lost_to_state = first.num_tokens_lost_to_state
        if self._tells_routes and output.finish_reason is not None and state.route is not None:
            told_route = routing_details(state.route, state.num_lost_to_state)
            output = structs.replace(output, routing=told_route)
        cached = state.num_cached_tokens
        if output.num_cached_tokens != cached or output.kv_transfer_params is not None:
            output = structs.replace(output, num_cached_tokens=cached, kv_transfer_params=None)
        state.sent += output.token_ids
        state.record.observe(output)
        return output


def _end_part(prefilled: Prefilled, remote: "asyncio.Future[None]") -> None:
    prefilled.end_part(asyncio.CancelledError() if remote.cancelled() else remote.exception())


def _checked(output: GenerateOutput, node: Node, state: RequestState) -> GenerateOutput:
    """Notes that `node` is alive.

    Raises `RequestAbortedError` where it gave the request up, or does not know its end.
    """
    node.on_sign_of_life()
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        reason = output.finish_reason
        raise RequestAbortedError(f"node {node.name} ended the request: {reason}")
    if len(state.sent) + len(output.token_ids) > state.request.sampling.max_tokens:
        raise RequestAbortedError(f"node {node.name} sent more tokens than it was asked for")
    return output
