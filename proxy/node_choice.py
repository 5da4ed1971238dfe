"""The choice of P and D for one attempt at a request, and what it turned out to be worth."""

from dataclasses import replace

from engine.types import GenerateOutput, RoutingDetails
from proxy.cluster.node import Node, NodeKind, NodeView
from proxy.cluster.node_pool import NodePool
from proxy.cluster.pairs import Pairs
from proxy.errors import NoDecodeNodeError, NoPrefillNodeError
from proxy.metrics import ProxyMetrics
from proxy.request_state import RequestState
from proxy.routing.policies import Route
from proxy.routing.router import Router


class NodeChoice:
    """Offers the router the nodes that may get a request, and counts what it chose."""

    def __init__(
        self, pool: NodePool, router: Router, pairs: Pairs, *, metrics: ProxyMetrics
    ) -> None:
        self._pool = pool
        self._router = router
        self._pairs = pairs
        self._metrics = metrics

    def choose(self, state: RequestState, *, use_prefill: bool) -> tuple[Node, Node | None]:
        """D, and P unless D computes the prompt itself.

        Raises `NoDecodeNodeError` without a D, `NoPrefillNodeError` without a P that D needs.
        """
        prefill = self.candidates(NodeKind.PREFILL, state) if use_prefill else ()
        decode = self.candidates(NodeKind.DECODE, state)
        if not decode:
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
        if self._pool.node(route.decode.name).worker.needs_prefill:
            raise NoPrefillNodeError
        if prefill:
            reason = route.reason if fitting else "hand_overs_fail"
        else:
            # Whoever is in use has failed this request, rests, or handed over what D refused.
            has_prefill = self._pool.num_available(NodeKind.PREFILL)
            reason = "prefill_failed" if has_prefill else "no_prefill_node"
        self._metrics.local_prefills.labels(reason).inc()
        return self._pool.node(route.decode.name), None

    def choose_decode(self, state: RequestState, prefill: Node) -> Node:
        """Another D for what P has prefilled; raises `NoDecodeNodeError` without one."""
        decode = self.candidates(NodeKind.DECODE, state)
        if not decode:
            raise NoDecodeNodeError
        route = self._router.choose(state.prompt, (prefill.view,), decode)
        state.route = replace(route, prefill=prefill.view)
        return self._pool.node(route.decode.name)

    def missing(self, state: RequestState) -> NodeKind | None:
        """The kind of node that the request cannot do without, and of which none may have it."""
        decode = self.candidates(NodeKind.DECODE, state)
        if not decode:
            return NodeKind.DECODE
        needs_prefill = self._pool.node(decode[0].name).worker.needs_prefill
        if needs_prefill and not self.candidates(NodeKind.PREFILL, state):
            return NodeKind.PREFILL
        return None

    def candidates(self, kind: NodeKind, state: RequestState) -> tuple[NodeView, ...]:
        """Usable nodes that have not failed this request and whose context holds it.

        An answer that has begun goes on with the same model alone: same weights, same config.

        A D that rests is better than none; where all P rest, D computes the prompt.
        """
        request = state.request
        num_new = len(request.output_token_ids) + 1
        if kind is NodeKind.DECODE:
            num_new = request.sampling.max_tokens
        length = len(request.prompt_token_ids) + num_new
        usable = [
            node
            for node in self._pool.available(kind)
            if node.info.engine_id not in state.failed
            and length <= node.info.max_model_len
            and (not state.sent or _may_continue(node, state))
        ]
        awake = [node for node in usable if not node.rests]
        chosen = awake or usable if kind is NodeKind.DECODE else awake
        return tuple([node.view for node in chosen])

    def count_prefill_hit(self, state: RequestState) -> None:
        """Compares what P was expected to have cached with what it had."""
        if state.route is not None and state.prefilled is not None:
            predicted, real = state.route.prefill_hit, state.prefilled.output.num_cached_tokens
            self._metrics.count_hit(NodeKind.PREFILL, predicted.resumable, real)

    def count_decode_hit(self, output: GenerateOutput, state: RequestState) -> None:
        """`output`: D's last one, which says how much of a hand-over was there already."""
        if state.route is None:
            return
        predicted = state.route.decode_hit
        if state.prefilled is None:
            real = output.num_cached_tokens
            self._metrics.count_hit(NodeKind.DECODE, predicted.resumable, real)
        elif output.kv_transfer is not None and output.was_pulled:
            real = output.kv_transfer.decode_cached_tokens
            self._metrics.count_hit(NodeKind.DECODE, predicted.attention, real)


def _may_continue(node: Node, state: RequestState) -> bool:
    """True for the same model: same weights, same config; and an engine that can."""
    is_same = node.info.model_identity == state.model_identity
    return is_same and node.worker.can_continue(state.request.sampling)


def routing_details(route: Route, num_lost_to_state: int) -> RoutingDetails:
    """`route` as clients are told, and the tokens that a cached prefix lost for want of a state."""
    is_local = route.prefill is None
    return RoutingDetails(
        prefill=None if route.prefill is None else route.prefill.name,
        decode=route.decode.name,
        reason=route.reason,
        prefill_hit_tokens=route.prefill_hit.resumable,
        prefix_tokens_lost_to_state=num_lost_to_state,
        decode_hit_tokens=route.decode_hit.resumable if is_local else route.decode_hit.attention,
    )
