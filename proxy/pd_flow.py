"""One request through the cluster: prefill on P, decode on D, and what to do if one fails.

Knows nothing of HTTP and text; which nodes to take is the policy's choice.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from engine.errors import DeadlineExceededError, KVTransferParamsError, TandemError
from engine.types import GenerateOutput, GenerateRequest, KVTransferParams
from proxy.blame import as_client_sees_it, is_client_fault
from proxy.cluster.node import Node, NodeKind, NodeView
from proxy.cluster.node_pool import NodePool
from proxy.cluster.pairs import Pairs
from proxy.journey import Journey
from proxy.legs import Legs, is_whole_answer, prefill_request
from proxy.metrics import ProxyMetrics
from proxy.releaser import Releaser
from proxy.routing.policy import RoutingPolicy

MAX_PREFILL_NODES: Final = 2
MAX_ATTEMPTS: Final = 2


@dataclass(slots=True, frozen=True)
class Prefilled:
    """What P made of a request. Without `params` the outputs are the whole answer."""

    node: Node
    outputs: tuple[GenerateOutput, ...]
    params: KVTransferParams | None
    num_cached_tokens: int


@dataclass(slots=True, frozen=True)
class Start:
    """Where decoding begins. Without `prefilled` D computes the prompt itself."""

    decode: Node
    prefilled: Prefilled | None = None


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

    async def close(self) -> None:
        await self._releaser.close()

    async def check_health(self) -> None:
        """The proxy itself holds nothing that could die."""

    async def check_ready(self) -> tuple[str, ...]:
        self._pool.check_ready()
        return self._pairs.reasons()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """D's outputs, with P's count of cached tokens; `aclose` cancels on the node at work.

        Raises `UnavailableError` when no decode node can be used or one is lost after its first
        token; errors that are the client's own pass unchanged. Before the first token a failed D
        is replaced once, by another one and a fresh prefill.
        """
        deadline = asyncio.get_running_loop().time() + self._request_timeout_s
        journey = Journey(replace(request, kv_transfer_params=None), deadline)
        while not journey.is_done:
            async with aclosing(self._try(journey)) as outputs:
                async for output in outputs:
                    yield output

    async def _try(self, journey: Journey) -> AsyncGenerator[GenerateOutput]:
        """One attempt; a failure that another attempt may mend ends it without an error."""
        try:
            async with aclosing(self._attempt(journey)) as outputs:
                async for output in outputs:
                    journey.num_tokens += len(output.token_ids)
                    yield output
            journey.is_done = True
        except TandemError as error:
            if not self._may_try_again(journey, error):
                raise as_client_sees_it(error, journey.num_tokens) from error

    def _may_try_again(self, journey: Journey, error: TandemError) -> bool:
        if is_client_fault(error) or journey.num_tokens or journey.num_attempts >= MAX_ATTEMPTS:
            return False
        return bool(self._candidates(NodeKind.DECODE, journey))

    async def _attempt(self, journey: Journey) -> AsyncGenerator[GenerateOutput]:
        journey.num_attempts += 1
        start = await self._prefill(journey)
        if start.prefilled is not None and start.prefilled.params is None:
            for output in start.prefilled.outputs:
                yield output
            return
        try:
            async with aclosing(self._decode(journey, start)) as outputs:
                async for output in outputs:
                    yield output
        except TandemError as error:
            journey.failed.add(self._to_blame(start, error).name)
            raise
        finally:
            if journey.num_tokens == 0:
                self._give_up(start.prefilled)

    async def _prefill(self, journey: Journey) -> Start:
        """P's part, on a second P if the first fails, and left to D if that one fails too.

        Raises `UnavailableError` when there is no D, before any P has worked in vain.
        """
        for _ in range(MAX_PREFILL_NODES):
            start, node = self._choose(journey, self._candidates(NodeKind.PREFILL, journey))
            if node is None:
                return start
            try:
                return Start(start.decode, await self._prefill_on(node, journey))
            except TandemError as error:
                if is_client_fault(error):
                    raise
                journey.failed.add(node.name)
        return self._choose(journey, ())[0]

    async def _prefill_on(self, node: Node, journey: Journey) -> Prefilled:
        request = prefill_request(journey.request)
        leg = self._legs.run(node, request, total_s=journey.remaining_s())
        try:
            async with aclosing(leg) as outputs:
                news = tuple([output async for output in outputs])
        except (asyncio.CancelledError, DeadlineExceededError):
            self._releaser.release_unheard(node, request.request_id)
            raise
        params = news[-1].kv_transfer_params
        if params is None and not is_whole_answer(news[-1], journey.request.sampling):
            raise TandemError(f"node {node.name} prefilled without giving kv_transfer_params")
        return Prefilled(node, news, params, max(output.num_cached_tokens for output in news))

    async def _decode(self, journey: Journey, start: Start) -> AsyncGenerator[GenerateOutput]:
        prefilled = start.prefilled
        params = None if prefilled is None else prefilled.params
        request = replace(journey.request, kv_transfer_params=params)
        leg = self._legs.run(start.decode, request, total_s=journey.remaining_s())
        async with aclosing(leg) as outputs:
            async for output in outputs:
                if prefilled is not None:
                    self._pairs.accepted(prefilled.node, start.decode)
                yield _for_client(output, prefilled)

    def _choose(self, journey: Journey, prefill: tuple[NodeView, ...]) -> tuple[Start, Node | None]:
        decode = self._candidates(NodeKind.DECODE, journey)
        if not decode:
            raise self._pool.no_decode_node(but=journey.failed)
        route = self._policy.choose(journey.request, prefill, decode)
        fitting = self._pairs.fitting(prefill, route.decode)
        if route.prefill is not None and route.prefill not in fitting:
            route = self._policy.choose(journey.request, fitting, (route.decode,))
        start = Start(self._pool.node(route.decode.name))
        if route.prefill is not None:
            return start, self._pool.node(route.prefill.name)
        self._metrics.local_prefills.labels(_why_local(journey, prefill, fitting)).inc()
        return start, None

    def _candidates(self, kind: NodeKind, journey: Journey) -> tuple[NodeView, ...]:
        nodes = self._pool.available(kind)
        return tuple(node.view for node in nodes if node.name not in journey.failed)

    def _to_blame(self, start: Start, error: TandemError) -> Node:
        """D is to blame for what fails on it, except for a hand-over that it refuses."""
        if start.prefilled is None or not isinstance(error, KVTransferParamsError):
            return start.decode
        self._pairs.refused(start.prefilled.node, start.decode, error)
        return start.prefilled.node

    def _give_up(self, prefilled: Prefilled | None) -> None:
        if prefilled is not None and prefilled.params is not None:
            self._releaser.release(prefilled.node, prefilled.params)


def _for_client(output: GenerateOutput, prefilled: Prefilled | None) -> GenerateOutput:
    cached = output.num_cached_tokens if prefilled is None else prefilled.num_cached_tokens
    return replace(output, num_cached_tokens=cached, kv_transfer_params=None)


def _why_local(
    journey: Journey, prefill: tuple[NodeView, ...], fitting: tuple[NodeView, ...]
) -> str:
    if prefill:
        return "policy" if fitting else "hand_overs_fail"
    return "prefill_failed" if journey.failed else "no_prefill_node"
