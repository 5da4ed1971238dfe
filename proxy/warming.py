"""Canaries: nodes serve only after a request of the proxy's own has worked, in each of their lives.

Nodes that register and workers of other engines need one: that a worker answers /health says
nothing of whether its peers can read what it computes.
"""

import asyncio
from typing import Final

import structlog

from engine.errors import TandemError, UnavailableError
from proxy.canary import decode_alone, hand_over
from proxy.cluster.node import Node, NodeKind, Stage
from proxy.cluster.node_pool import NodePool

log = structlog.get_logger()

SWEEP_S: Final = 0.5
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
MAX_PARTNERS: Final = 2
"""Nodes that one canary tries before it waits."""


class Warming:
    """Owner of the canaries of one proxy, until `close`. One task for each node that warms."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._tasks: dict[Node, asyncio.Task[None]] = {}
        self._problems: dict[Node, str] = {}

    def problem_of(self, node: Node) -> str:
        """Why a node that answers does not serve yet; empty if nothing is wrong."""
        return self._problems.get(node, "") if node.stage is Stage.WARMING else ""

    async def watch(self) -> None:
        """Warms whoever is new, as long as the proxy lives."""
        while True:
            for node in self._pool.nodes:
                if node.stage is Stage.WARMING and node not in self._tasks:
                    self._tasks[node] = asyncio.create_task(self._warm(node))
            await asyncio.sleep(SWEEP_S)

    async def forget(self, node: Node) -> None:
        """Ends the node's canary: it is leaving for good."""
        task = self._tasks.get(node)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._problems.pop(node, None)

    async def close(self) -> None:
        """Ends all canaries; the pool closes the nodes."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _warm(self, node: Node) -> None:
        """Tries canaries until one works, in this life of the node."""
        pause_s = MIN_PAUSE_S
        try:
            while node.stage is Stage.WARMING:
                problem = await self._problem_of_canary(node)
                if problem and problem != self._problems.get(node):
                    log.warning("a canary failed", node=node.name, problem=problem)
                self._problems[node] = problem
                await asyncio.sleep(pause_s if problem else 0.0)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            del self._tasks[node]

    async def _problem_of_canary(self, node: Node) -> str:
        """Sends one that warms the node, or why it did not; empty if it did."""
        try:
            await self._send_canary(node)
        except TandemError as error:
            return str(error) or type(error).__name__
        return ""

    async def _send_canary(self, node: Node) -> None:
        """A P is of use only to a D that pulls from it. A D may compute prompts itself."""
        engine_id = node.info.engine_id
        problem: TandemError = UnavailableError("no node of the other kind to hand over with")
        for prefill, decode in self._pairs_with(node):
            lives = prefill.info.engine_id, decode.info.engine_id
            try:
                await hand_over(prefill, decode)
            except TandemError as error:
                problem = error
                continue
            prefill.warmed(lives[0])
            decode.warmed(lives[1])
            return
        if node.kind is NodeKind.PREFILL or node.worker.needs_prefill:
            raise problem
        await decode_alone(node)
        node.warmed(engine_id)

    def _pairs_with(self, node: Node) -> list[tuple[Node, Node]]:
        """Each (P, D) of the node and one of its partners, those first that serve already."""
        others = [it for it in self._pool.nodes if it.answers and it.kind is not node.kind]
        others.sort(key=lambda it: (not it.is_available, it.num_in_flight))
        partners = others[:MAX_PARTNERS]
        if node.kind is NodeKind.PREFILL:
            return [(node, decode) for decode in partners]
        return [(prefill, node) for prefill in partners]
