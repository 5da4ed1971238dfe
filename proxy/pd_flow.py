"""One request through the cluster: prefill on P, decode on D, and retries on other nodes.

Knows nothing of HTTP and text. A `Router` chooses the nodes.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import structlog
from msgspec import structs

from engine.errors import (
    DeadlineExceededError,
    KVTransferParamsError,
    NodeLostError,
    OverloadedError,
    RequestAbortedError,
    TandemError,
    UnavailableError,
)
from engine.rpc.client import StreamDeadlines
from engine.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    KVTransferParams,
    RoutingDetails,
)
from proxy.cluster.node import Node, NodeKind, NodeView
from proxy.cluster.node_pool import NodePool
from proxy.cluster.pairs import Pairs
from proxy.errors import (
    NoDecodeNodeError,
    as_client_sees_it,
    is_client_fault,
    is_engine_failure,
    outcome_of,
)
from proxy.metrics import ProxyMetrics, RequestTimer
from proxy.routing.policies import Route
from proxy.routing.prompt import RoutedPrompt
from proxy.routing.router import Router

log = structlog.get_logger()

SHUTTING_DOWN: Final = "the proxy is shutting down"
MAX_PREFILL_NODES: Final = 2
MAX_ATTEMPTS: Final = 2
MAX_LOST: Final = 1
"""Nodes that may go away with a request before the proxy takes the request for the cause."""


@dataclass(slots=True, frozen=True)
class Prefilled:
    """P's one output. Without `params` it is the whole answer, and D has nothing to do."""

    node: Node
    output: GenerateOutput

    @property
    def params(self) -> KVTransferParams | None:
        return self.output.kv_transfer_params

    def release(self) -> None:
        """Tells P that nobody will pull it."""
        if self.params is None:
            return
        engine_id, request_id = self.params.remote_engine_id, self.params.remote_request_id
        if engine_id is not None and request_id is not None:
            self.node.release(engine_id, request_id)


@dataclass(slots=True)
class RequestState:
    """The state that the attempts at one request share.

    `route` and `prefilled` are the current attempt's.

    `deadline` is in event-loop time. `failed` names the nodes that must not get the request again;
    `num_lost` of them went away while they had it. `num_tokens` reached the client.
    """

    request: GenerateRequest
    deadline: float
    timer: RequestTimer
    failed: set[str] = field(default_factory=set)
    num_attempts: int = 0
    num_lost: int = 0
    num_tokens: int = 0
    use_prefill: bool = True
    prefilled: Prefilled | None = None
    route: Route | None = None
    prompt: RoutedPrompt = field(init=False)

    def __post_init__(self) -> None:
        """Hashes nothing yet."""
        self.prompt = RoutedPrompt(self.request)

    def remaining_s(self) -> float:
        """Raises `DeadlineExceededError` when nothing remains."""
        seconds = self.deadline - asyncio.get_running_loop().time()
        if seconds <= 0:
            raise DeadlineExceededError("the request ran past --request-timeout")
        return seconds


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
        tells_routes: bool = False,
    ) -> None:
        self._pool = pool
        self._router = router
        self._tells_routes = tells_routes
        self._deadlines = deadlines
        self._metrics = metrics
        self._pairs = Pairs(pool)
        self.num_open = 0
        self._refuses_new = False
        self._is_over = False

    def refuse_new(self) -> None:
        """Refuses new requests and fails /ready from now on; requests under way continue."""
        self._refuses_new = True

    def end_open(self) -> None:
        """Ends the requests under way with an error that their clients see."""
        self._refuses_new = self._is_over = True
        for node in self._pool.nodes:
            node.cut_off()

    async def check_health(self) -> None:
        """Always succeeds: the proxy itself holds nothing that could die."""

    async def check_ready(self) -> tuple[str, ...]:
        if self._refuses_new:
            raise UnavailableError(SHUTTING_DOWN)
        if not self._pool.num_available(NodeKind.DECODE):
            raise NoDecodeNodeError
        return self._pairs.reasons()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """D's outputs, with P's count of cached tokens; `aclose` cancels on the node at work.

        Raises `UnavailableError` when no decode node is usable or D is lost after its first token.
        The client's own errors pass unchanged. If D fails before its first token, one other D gets
        the request, with a fresh prefill; an engine that failed at the request is the last.
        """
        if self._refuses_new:
            raise UnavailableError(SHUTTING_DOWN)
        deadline = asyncio.get_running_loop().time() + self._deadlines.total_s
        state = RequestState(request, deadline, RequestTimer(self._metrics))
        while True:
            # An error that leaves the block calls for another attempt: the loop goes round.
            with self._attempt(state):
                decode = await self._prefill(state)
                prefilled = state.prefilled
                if prefilled is not None and prefilled.params is None:
                    yield self._passed_on(prefilled.output, state)
                    return
                params = None if prefilled is None else prefilled.params
                to_decode = structs.replace(request, kv_transfer_params=params)
                async with self._running(to_decode, decode, state) as outputs:
                    output = _checked(await anext(outputs), decode)
                    state.prompt.drop_digests()
                    if prefilled is not None:
                        self._pairs.accepted(prefilled.node, decode)
                    while output.finish_reason is None:
                        yield self._passed_on(output, state)
                        output = _checked(await anext(outputs), decode)
                # D has ended the request before the client reads its last output.
                self._count_decode_hit(output, state)
                yield self._passed_on(output, state)
                return

    @contextmanager
    def _attempt(self, state: RequestState) -> Iterator[None]:
        """Swallows an error if another attempt may succeed, else raises what the client is told.

        Releases the prefill of an attempt that ends before D's first token.
        """
        state.num_attempts += 1
        state.prefilled = None
        self.num_open += 1
        try:
            yield
        except TandemError as error:
            if not self._may_retry(state, error):
                raise as_client_sees_it(error, state.num_tokens) from error
        finally:
            self.num_open -= 1
            if state.prefilled is not None and not state.num_tokens:
                state.prefilled.release()

    def _may_retry(self, state: RequestState, error: TandemError) -> bool:
        # Another node would refuse the same request, or break over it too; and tokens that the
        # client has cannot be taken back.
        if is_client_fault(error) or is_engine_failure(error) or state.num_tokens:
            return False
        if self._is_over or state.num_lost > MAX_LOST or state.num_attempts >= MAX_ATTEMPTS:
            return False
        return bool(self._candidates(NodeKind.DECODE, state))

    async def _prefill(self, state: RequestState) -> Node:
        """Chooses the nodes, lets P prefill into `state.prefilled`, and returns D.

        A second P gets the request if the first fails; if that fails too, D computes the prompt.
        Raises `UnavailableError` without a usable D, before any P computes in vain.
        """
        for num_left in reversed(range(MAX_PREFILL_NODES + 1)):
            await self._router.refresh(state.prompt)
            decode, node = self._choose(state, use_prefill=state.use_prefill and num_left > 0)
            if node is None:
                break
            try:
                # D counts from its choice on, or else a burst would choose the same one.
                with decode.carrying(), self._router.expecting(state.prompt, decode.view):
                    state.prefilled = await self._prefill_on(node, state)
                self._count_prefill_hit(state)
                break
            except TandemError as error:
                # A prompt that is wrong for P, longer than its context say, may be right for D.
                state.use_prefill = not is_client_fault(error)
                if is_engine_failure(error) or state.num_lost > MAX_LOST:
                    raise
        return decode

    async def _prefill_on(self, node: Node, state: RequestState) -> Prefilled:
        request = prefill_request(state.request)
        try:
            async with self._running(request, node, state) as outputs:
                output = _checked(await anext(outputs), node)
                # P ends by length after its one token; only a stop, or a client that wanted one
                # token, makes that the whole answer.
                whole = output.finish_reason is FinishReason.STOP or (
                    output.finish_reason is not None and state.request.sampling.max_tokens == 1
                )
                if output.kv_transfer_params is None and not whole:
                    raise TandemError(f"node {node.name} prefilled without kv_transfer_params")
                return Prefilled(node, output)
        except (asyncio.CancelledError, DeadlineExceededError):
            # P may finish the prefill, and nobody has heard P's id of it. P knows ours too.
            node.release(node.info.engine_id, request.request_id)
            raise

    @asynccontextmanager
    async def _running(
        self, request: GenerateRequest, node: Node, state: RequestState
    ) -> AsyncIterator[AsyncGenerator[GenerateOutput]]:
        """`request` on `node` until the block ends, with the node's load, health and metric."""
        deadlines = replace(self._deadlines, total_s=state.remaining_s())
        outcome = "cancelled"
        try:
            num_uncached = _num_uncached(state, node)
            expecting = self._router.expecting(state.prompt, node.view)
            with node.carrying(num_uncached), expecting:
                async with aclosing(node.client.generate(request, deadlines)) as outputs:
                    yield outputs
            outcome = "ok"
        except TandemError as error:
            outcome = outcome_of(error)
            self._note_failure(node, state, error)
            raise
        finally:
            labels = (self._router.policy_name, node.kind, node.name, outcome)
            self._metrics.node_requests.labels(*labels).inc()

    def _note_failure(self, node: Node, state: RequestState, error: TandemError) -> None:
        """Decides what `error` means for `node` and for the next attempt."""
        if isinstance(error, UnavailableError):
            node.set_problem(str(error))
        if state.prefilled is not None and isinstance(error, KVTransferParamsError):
            # D refuses only what P computed, so D may get the request again, without a prefill.
            self._pairs.refused(state.prefilled.node, node, error)
            state.use_prefill = False
            state.num_attempts -= 1
        else:
            state.failed.add(node.name)
            state.num_lost += isinstance(error, NodeLostError)
        # Clients are not told which node failed and why. A flood of refusals is not logged.
        if not is_client_fault(error) and not isinstance(error, OverloadedError):
            request_id = state.request.request_id
            log.warning(
                "node failed a request", node=node.name, request_id=request_id, problem=str(error)
            )

    def _passed_on(self, output: GenerateOutput, state: RequestState) -> GenerateOutput:
        """`output` as the client gets it, counted and timed."""
        state.num_tokens += len(output.token_ids)
        state.timer.observe(output)
        if self._tells_routes and output.finish_reason is not None and state.route is not None:
            output = structs.replace(output, routing=_details(state.route))
        if state.prefilled is None and output.kv_transfer_params is None:
            return output
        # D's cache hits are blocks that P has computed again: clients are told P's.
        cached = (output if state.prefilled is None else state.prefilled.output).num_cached_tokens
        return structs.replace(output, num_cached_tokens=cached, kv_transfer_params=None)

    def _choose(self, state: RequestState, *, use_prefill: bool) -> tuple[Node, Node | None]:
        """D, and P unless D computes the prompt itself."""
        prefill = self._candidates(NodeKind.PREFILL, state) if use_prefill else ()
        decode = self._candidates(NodeKind.DECODE, state)
        if self._is_over or not decode:
            raise NoDecodeNodeError
        route = self._router.choose(state.prompt, prefill, decode)
        # Which P fits depends on D, so D is chosen first and P again if the pair does not work.
        fitting = self._pairs.fitting(prefill, route.decode)
        if route.prefill is not None and route.prefill not in fitting:
            route = self._router.choose(state.prompt, fitting, (route.decode,))
        state.route = route
        self._metrics.routes.labels(self._router.policy_name, route.reason).inc()
        if route.prefill is not None:
            return self._pool.node(route.decode.name), self._pool.node(route.prefill.name)
        if prefill:
            reason = route.reason if fitting else "hand_overs_fail"
        else:
            reason = "prefill_failed" if state.failed else "no_prefill_node"
        self._metrics.local_prefills.labels(reason).inc()
        return self._pool.node(route.decode.name), None

    def _count_prefill_hit(self, state: RequestState) -> None:
        if state.route is not None and state.prefilled is not None:
            predicted, real = state.route.prefill_hit, state.prefilled.output.num_cached_tokens
            self._metrics.count_hit(NodeKind.PREFILL, predicted.resumable, real)

    def _count_decode_hit(self, output: GenerateOutput, state: RequestState) -> None:
        """`output`: D's last one, which says how much of a hand-over was there already."""
        if state.route is None:
            return
        predicted = state.route.decode_hit
        if state.prefilled is None:
            real = output.num_cached_tokens
            self._metrics.count_hit(NodeKind.DECODE, predicted.resumable, real)
        elif output.kv_transfer is not None:
            real = output.kv_transfer.decode_cached_tokens
            self._metrics.count_hit(NodeKind.DECODE, predicted.attention, real)

    def _candidates(self, kind: NodeKind, state: RequestState) -> tuple[NodeView, ...]:
        """Usable nodes that have not failed this request and whose context holds it."""
        num_new = 1 if kind is NodeKind.PREFILL else state.request.sampling.max_tokens
        length = len(state.request.prompt_token_ids) + num_new
        return tuple(
            node.view
            for node in self._pool.available(kind)
            if node.name not in state.failed and length <= node.info.max_model_len
        )


def prefill_request(request: GenerateRequest) -> GenerateRequest:
    """The request for P: the same sampling, one token, and P keeps what it computes."""
    min_tokens = min(request.sampling.min_tokens, 1)
    sampling = structs.replace(request.sampling, max_tokens=1, min_tokens=min_tokens)
    params = KVTransferParams(do_remote_decode=True)
    return structs.replace(request, sampling=sampling, kv_transfer_params=params)


def _checked(output: GenerateOutput, node: Node) -> GenerateOutput:
    """Notes that `node` is alive. Raises `RequestAbortedError` where it gave the request up."""
    node.on_sign_of_life()
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        reason = output.finish_reason
        raise RequestAbortedError(f"node {node.name} ended the request: {reason}")
    return output


def _num_uncached(state: RequestState, node: Node) -> int:
    """Prompt tokens that `node` is expected to compute; a D with a prefill computes none."""
    route, num_tokens = state.route, state.prompt.num_tokens
    if route is None or (state.prefilled is not None and node.name == route.decode.name):
        return 0
    hit = route.decode_hit if route.prefill is None else route.prefill_hit
    return num_tokens - hit.resumable


def _details(route: Route) -> RoutingDetails:
    is_local = route.prefill is None
    return RoutingDetails(
        prefill=None if route.prefill is None else route.prefill.name,
        decode=route.decode.name,
        reason=route.reason,
        prefill_hit_tokens=route.prefill_hit.resumable,
        decode_hit_tokens=route.decode_hit.resumable if is_local else route.decode_hit.attention,
    )
