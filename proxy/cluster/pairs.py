"""Pairs of P and D whose hand-overs fail, so that no P prefills a prompt in vain.

Decode nodes report them in `Describe`, and the proxy counts what they refuse; it tries again later.
"""

from collections.abc import Iterable, Sequence

import structlog

from engine.errors import TandemError
from engine.types import HandOverProblem
from proxy.cluster.node import Node, NodeKind, NodeView
from proxy.cluster.node_pool import NodePool

log = structlog.get_logger()


class Pairs:
    """`PdFlow` asks it for each route and for /ready."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._logged: set[tuple[str, str]] = set()

    def fitting(self, prefill: Sequence[NodeView], decode: NodeView) -> tuple[NodeView, ...]:
        """The nodes of `prefill` whose hand-overs to `decode` work, as far as is known.

        `decode` would refuse those of another model, such as one with other weights of one name.
        """
        problems = self._problems(self._pool.node(decode.name))
        self._log_new(decode, problems, prefill)
        avoided = {problem.engine_id for problem in problems if problem.retry_in_s > 0}
        return tuple(
            node
            for node in prefill
            if node.info.engine_id not in avoided
            and node.info.model_identity == decode.info.model_identity
        )

    def refused(self, prefill: Node, decode: Node, error: TandemError) -> None:
        """Counts a hand-over from `prefill` that `decode` refused."""
        engine_id, address = prefill.info.engine_id, prefill.name
        decode.refusals.failed(engine_id, address, "refused", detail=str(error))

    def accepted(self, prefill: Node, decode: Node) -> None:
        """`decode` accepted a hand-over. If its pull fails, its next `Describe` reports that."""
        decode.refusals.worked(prefill.info.engine_id, prefill.name)

    def reasons(self) -> tuple[str, ...]:
        """One line for each failing pair whose two nodes are in use."""
        known = {node.info.engine_id for node in self._pool.available(NodeKind.PREFILL)}
        return tuple(
            problem.reason(node.info.engine_id)
            for node in self._pool.available(NodeKind.DECODE)
            for problem in self._problems(node)
            if problem.engine_id in known
        )

    def _problems(self, decode: Node) -> tuple[HandOverProblem, ...]:
        return *decode.info.hand_over_problems, *decode.refusals.present()

    def _log_new(
        self, decode: NodeView, problems: Iterable[HandOverProblem], prefill: Sequence[NodeView]
    ) -> None:
        known = {node.info.engine_id for node in prefill}
        of_decode = {pair for pair in self._logged if pair[0] == decode.name}
        now = {(decode.name, it.engine_id): it for it in problems if it.engine_id in known}
        for pair in now.keys() - of_decode:
            log.warning(
                "a pair of nodes is not used: their hand-overs fail",
                prefill=now[pair].engine_id,
                decode=decode.name,
                cause=now[pair].cause,
                problem=now[pair].detail,
            )
        self._logged = (self._logged - of_decode) | now.keys()
