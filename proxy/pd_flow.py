"""One request through the cluster: prefill on P, decode on D, and what to do if one fails.

Knows nothing of HTTP and text; which nodes to take is the policy's choice.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog
from msgspec.structs import replace

from engine.errors import (
    DeadlineExceededError,
    KVTransferParamsError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from engine.types import GenerateOutput, GenerateRequest
from proxy.blame import as_client_sees_it, is_client_fault, is_engine_failure
from proxy.cluster.node import Node, NodeKind, NodeView
from proxy.cluster.node_pool import NoDecodeNodeError, NodePool
from proxy.cluster.pairs import Pairs
from proxy.journey import Journey, Prefilled
from proxy.legs import Legs, is_whole_answer, prefill_request
from proxy.metrics import ProxyMetrics
from proxy.releaser import Releaser
from proxy.routing.policy import RoutingPolicy

log = structlog.get_logger()

SHUTTING_DOWN: Final = "the proxy is shutting down"
MAX_PREFILL_NODES: Final = 2
MAX_ATTEMPTS: Final = 2
MAX_LOST: Final = 1
"""Nodes that may go away with a request before it is taken for what ends them."""


class PdFlow:
    """The proxy's `Generator`. Owns its background releases only; nodes belong to the pool."""

    def __init__(
        self,
        pool: NodePool,
        policy: RoutingPolicy,
        legs: Legs,
        *,
        metrics: ProxyMetrics,
        request_timeout_s: float,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._legs = legs
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._releaser = Releaser()
        self._pairs = Pairs(pool)
        self._num_open = 0
        self._refuses_new = False
        self._is_over = False

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return self._num_open

    def refuse_new(self) -> None:
        """From now on no request is taken and the proxy is not ready; what is under way goes on."""
        self._refuses_new = True

    def end_open(self) -> None:
        """What is under way ends with an error that its clients see."""
        self._refuses_new = self._is_over = True
        for node in self._pool.nodes:
            node.cut_off()

    async def close(self) -> None:
        await self._releaser.close()

    async def check_health(self) -> None:
        """The proxy itself holds nothing that could die."""

    async def check_ready(self) -> tuple[str, ...]:
        if self._refuses_new:
            raise UnavailableError(SHUTTING_DOWN)
        self._pool.check_ready()
        return self._pairs.reasons()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """D's outputs, with P's count of cached tokens; `aclose` cancels on the node at work.

        Raises `UnavailableError` when no decode node can be used or one is lost after its first
        token; errors that are the client's own pass unchanged. Before the first token a failed D
        is replaced once, by another one and a fresh prefill; never one whose engine failed.
        """
        if self._refuses_new:
            raise UnavailableError(SHUTTING_DOWN)
        async with self._journey(request) as journey:
            is_last = False
            while not is_last:
                output = await self._next(journey)
                is_last = output.finish_reason is not None
                yield output

    @asynccontextmanager
    async def _journey(self, request: GenerateRequest) -> AsyncIterator[Journey]:
        deadline = asyncio.get_running_loop().time() + self._request_timeout_s
        journey = Journey(replace(request, kv_transfer_params=None), deadline)
        self._num_open += 1
        try:
            yield journey
        finally:
            self._num_open -= 1
            await self._end_attempt(journey)

    async def _next(self, journey: Journey) -> GenerateOutput:
        """The next output, of another attempt where the one under way fails and may be mended."""
        while True:
            try:
                if journey.leg is None and not journey.whole_answer:
                    await self._begin_attempt(journey)
                if journey.whole_answer:
                    return journey.whole_answer.popleft()
                return await self._read(journey)
            except TandemError as error:
                await self._end_attempt(journey)
                if not self._may_try_again(journey, error):
                    raise as_client_sees_it(error, journey.num_tokens) from error

    def _may_try_again(self, journey: Journey, error: TandemError) -> bool:
        if is_client_fault(error) or is_engine_failure(error) or journey.num_tokens:
            return False
        if self._is_over or journey.num_lost > MAX_LOST or journey.num_attempts >= MAX_ATTEMPTS:
            return False
        return bool(self._candidates(NodeKind.DECODE, journey))

    async def _begin_attempt(self, journey: Journey) -> None:
        """P's part is done and D's under way, unless P's was the whole answer."""
        journey.num_attempts += 1
        decode = await self._prefill(journey)
        prefilled = journey.prefilled
        if prefilled is not None and prefilled.params is None:
            journey.whole_answer.extend(prefilled.outputs)
            return
        params = None if prefilled is None else prefilled.params
        request = replace(journey.request, kv_transfer_params=params)
        leg = self._legs.run(decode, request, total_s=journey.remaining_s())
        journey.leg = await journey.current.enter_async_context(leg)

    async def _end_attempt(self, journey: Journey) -> None:
        """Nothing of it runs on any node; a prefill that nobody will pull is given up."""
        prefilled, journey.prefilled, journey.leg = journey.prefilled, None, None
        await journey.current.aclose()
        if prefilled is not None and prefilled.params is not None and not journey.num_tokens:
            self._releaser.release(prefilled.node, prefilled.params)

    async def _read(self, journey: Journey) -> GenerateOutput:
        leg, prefilled = journey.leg, journey.prefilled
        assert leg is not None
        try:
            output = await leg.read()
        except TandemError as error:
            if prefilled is None or not isinstance(error, KVTransferParamsError):
                journey.blame(leg.node, error)
            else:
                self._pairs.refused(prefilled.node, leg.node, error)
                # D can compute what it will not take from P, so it may get the request again.
                journey.use_prefill = False
                journey.num_attempts -= 1
            _log_failure(leg.node, journey, error)
            raise
        if prefilled is not None and not journey.num_tokens:
            self._pairs.accepted(prefilled.node, leg.node)
        journey.num_tokens += len(output.token_ids)
        cached = output.num_cached_tokens if prefilled is None else prefilled.num_cached_tokens
        return replace(output, num_cached_tokens=cached, kv_transfer_params=None)

    async def _prefill(self, journey: Journey) -> Node:
        """P's part, on a second P if the first fails, and left to D if that one fails too.

        Returns D. Raises `UnavailableError` when there is none, before any P has worked in vain.
        """
        for _ in range(MAX_PREFILL_NODES):
            prefill = self._candidates(NodeKind.PREFILL, journey) if journey.use_prefill else ()
            decode, node = self._choose(journey, prefill)
            if node is None:
                return decode
            try:
                journey.prefilled = await self._prefill_on(node, journey)
                return decode
            except TandemError as error:
                journey.blame(node, error)
                _log_failure(node, journey, error)
                # What is wrong for P, a prompt longer than its context say, may be right for D.
                journey.use_prefill = not is_client_fault(error)
                if is_engine_failure(error) or journey.num_lost > MAX_LOST:
                    raise
        return self._choose(journey, ())[0]

    async def _prefill_on(self, node: Node, journey: Journey) -> Prefilled:
        request, news = prefill_request(journey.request), list[GenerateOutput]()
        try:
            async with self._legs.run(node, request, total_s=journey.remaining_s()) as leg:
                while not news or news[-1].finish_reason is None:
                    news.append(await leg.read())
        except (asyncio.CancelledError, DeadlineExceededError):
            self._releaser.release_unheard(node, request.request_id)
            raise
        params = news[-1].kv_transfer_params
        if params is None and not is_whole_answer(news[-1], journey.request.sampling):
            raise TandemError(f"node {node.name} prefilled without giving kv_transfer_params")
        cached = max(output.num_cached_tokens for output in news)
        return Prefilled(node, tuple(news), params, cached)

    def _choose(self, journey: Journey, prefill: tuple[NodeView, ...]) -> tuple[Node, Node | None]:
        """D, and P unless D computes the prompt itself."""
        decode = self._candidates(NodeKind.DECODE, journey)
        if self._is_over or not decode:
            raise NoDecodeNodeError
        route = self._policy.choose(journey.request, prefill, decode)
        fitting = self._pairs.fitting(prefill, route.decode)
        if route.prefill is not None and route.prefill not in fitting:
            route = self._policy.choose(journey.request, fitting, (route.decode,))
        if route.prefill is not None:
            return self._pool.node(route.decode.name), self._pool.node(route.prefill.name)
        self._metrics.local_prefills.labels(_why_local(journey, prefill, fitting)).inc()
        return self._pool.node(route.decode.name), None

    def _candidates(self, kind: NodeKind, journey: Journey) -> tuple[NodeView, ...]:
        """Nodes in use that have not failed this request and whose context holds it."""
        request = journey.request
        num_new = 1 if kind is NodeKind.PREFILL else request.sampling.max_tokens
        length = len(request.prompt_token_ids) + num_new
        return tuple(
            node.view
            for node in self._pool.available(kind)
            if node.name not in journey.failed and length <= node.max_model_len
        )


def _log_failure(node: Node, journey: Journey, error: TandemError) -> None:
    """Clients are not told which node failed and why; a flood of refusals is no news."""
    if not is_client_fault(error) and not isinstance(error, OverloadedError):
        request_id = journey.request.request_id
        log.warning(
            "node failed a request", node=node.name, request_id=request_id, problem=str(error)
        )


def _why_local(
    journey: Journey, prefill: tuple[NodeView, ...], fitting: tuple[NodeView, ...]
) -> str:
    if prefill:
        return "policy" if fitting else "hand_overs_fail"
    return "prefill_failed" if journey.failed else "no_prefill_node"
