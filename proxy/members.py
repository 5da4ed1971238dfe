"""Nodes that register by themselves: their leases, and the canaries that let them serve.

    Join ─▶ away ─▶ warming ─▶ serving ─ Leave ─▶ leaving ─ no request left ─▶ forgotten
             └─ silent for a lease and not to be reached ──────────────────────────▲

A lease alone removes nobody: as long as the proxy reaches a node, it serves, so that a proxy that
restarts or a link that is lost in one direction costs no node.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog
from grpc import aio

from engine.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from engine.types import Label
from proxy.canary import decode_alone, hand_over
from proxy.cluster.node import NOT_YET, Node, NodeKind, Stage
from proxy.cluster.node_pool import NodePool
from serving.rpc.node_http import HTTP_SCHEMES, NodeUrl, parse_node_url
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import MembershipServicer, add_MembershipServicer_to_server
from serving.tls import ClientTls, client_tls

log = structlog.get_logger()

LEASE_S: Final = 15.0
"""A member joins again after a third of it."""
MAX_MEMBERS: Final = 1024
SWEEP_S: Final = 0.5
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
MAX_PARTNERS: Final = 2
"""Nodes that one canary tries before it waits."""


class _Join(msgspec.Struct, frozen=True):
    """A JoinRequest whose fields are bounded."""

    engine_id: Label
    kind: NodeKind
    url: Label


@dataclass(slots=True, eq=False)
class _Member:
    """A registered node; `until` ends its lease, in event-loop time. `problem` of its canary."""

    node: Node
    engine_id: str
    until: float
    problem: str = ""
    warming: asyncio.Task[None] | None = None


class Members(MembershipServicer):
    """The gRPC service, and the owner of the nodes that came by it, until `close`.

    `ca_certs`: authorities for nodes that speak TLS, None for the machine's.
    """

    def __init__(self, pool: NodePool, *, ca_certs: str | None) -> None:
        self._pool = pool
        self._ca_certs = ca_certs
        self._tls: ClientTls | None = None
        self._members: dict[str, _Member] = {}
        # One at a time: two Joins of one node must not add it twice.
        self._changing = asyncio.Lock()

    def register(self, server: aio.Server) -> None:
        add_MembershipServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def drain(self) -> None:
        """Calls are short: nothing has to end."""

    async def close(self) -> None:
        """Ends the canaries; the pool closes the nodes."""
        tasks = [it.warming for it in self._members.values() if it.warming is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stages(self) -> dict[str, str]:
        """By label the stage of every node, also of those that the proxy's options name."""
        return {node.label: node.stage for node in self._pool.nodes}

    def problem_of(self, node: Node) -> str:
        """Why a node that answers does not serve yet; empty if nothing is wrong."""
        member = self._members.get(node.name)
        return member.problem if member is not None and node.stage is Stage.WARMING else ""

    async def Join(
        self, request: pb.JoinRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.JoinReply:
        try:
            asked = {"engine_id": request.engine_id, "kind": request.kind, "url": request.url}
            join = msgspec.convert(asked, _Join)
            url = parse_node_url(join.url)
        except (msgspec.ValidationError, ConfigError) as error:
            raise InvalidRequestError(f"a node cannot join so: {error}") from error
        if url.scheme in HTTP_SCHEMES:
            raise InvalidRequestError(f"a node joins with its gRPC port, not with {url.text}")
        async with self._changing:
            node, problem = await self._joined(join, url)
        return pb.JoinReply(lease_s=LEASE_S, stage=node.stage, problem=problem)

    async def Leave(
        self, request: pb.LeaveRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.LeaveReply:
        for member in self._members.values():
            if member.engine_id == request.engine_id:
                member.node.leaves(True)
        return pb.LeaveReply()

    async def watch(self) -> None:
        """Forgets who is gone and warms who is new, as long as the proxy lives."""
        while True:
            await asyncio.sleep(SWEEP_S)
            async with self._changing:
                await self._sweep()

    async def _sweep(self) -> None:
        for member in list(self._members.values()):
            if self._is_gone(member):
                await self._forget(member)
            elif member.node.stage is Stage.WARMING and member.warming is None:
                member.warming = asyncio.create_task(self._warm(member))

    async def _joined(self, join: _Join, url: NodeUrl) -> tuple[Node, str]:
        """The node that joins, added if it is new, and why it does not serve yet."""
        until = asyncio.get_running_loop().time() + LEASE_S
        for node in self._pool.nodes:
            # The options name it too, by another URL perhaps: once is enough.
            is_same = node.name == url.text or node.info.engine_id == join.engine_id
            if is_same and node.name not in self._members:
                return node, node.problem or ""
        member = self._members.get(url.text)
        if member is not None and member.node.kind is not join.kind:
            await self._forget(member)
            member = None
        if member is None:
            if len(self._members) >= MAX_MEMBERS:
                raise OverloadedError(f"{MAX_MEMBERS} nodes are registered already")
            node = self._pool.add(url, join.kind, await self._tls_for(url))
            member = self._members[url.text] = _Member(node, join.engine_id, until)
            log.info("node joins", node=node.name, kind=node.kind, engine_id=join.engine_id)
        elif member.engine_id != join.engine_id:
            # Another process has the address of one that left or was lost.
            member.engine_id = join.engine_id
            member.node.leaves(False)
            member.node.set_problem(NOT_YET)
        member.until = until
        return member.node, member.node.problem or member.problem

    async def _tls_for(self, url: NodeUrl) -> ClientTls | None:
        if url.has_tls and self._tls is None:
            # Reads the machine's authorities, which takes time.
            self._tls = await asyncio.to_thread(client_tls, self._ca_certs)
        return self._tls if url.has_tls else None

    def _is_gone(self, member: _Member) -> bool:
        node = member.node
        if node.stage is Stage.LEAVING:
            return not node.num_in_flight
        return not node.answers and asyncio.get_running_loop().time() > member.until

    async def _forget(self, member: _Member) -> None:
        log.info("node is forgotten", node=member.node.name, engine_id=member.engine_id)
        if member.warming is not None:
            member.warming.cancel()
            await asyncio.gather(member.warming, return_exceptions=True)
        del self._members[member.node.name]
        await self._pool.remove(member.node)

    async def _warm(self, member: _Member) -> None:
        """Tries canaries until one works, in this life of the node."""
        node, pause_s = member.node, MIN_PAUSE_S
        try:
            while node.stage is Stage.WARMING:
                problem = await self._problem_of_canary(node)
                if problem and problem != member.problem:
                    log.warning("a canary failed", node=node.name, problem=problem)
                member.problem = problem
                await asyncio.sleep(pause_s if problem else 0.0)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            member.warming = None

    async def _problem_of_canary(self, node: Node) -> str:
        """Sends one that warms the node, or why it did not; empty if it did."""
        try:
            await self._send_canary(node)
        except TandemError as error:
            return str(error) or type(error).__name__
        return ""

    async def _send_canary(self, node: Node) -> None:
        """A P is of use only to a D that pulls from it. A D can compute prompts itself."""
        engine_id = node.info.engine_id
        problem: TandemError = UnavailableError("no decode node to hand over to")
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
        match node.kind:
            case NodeKind.PREFILL:
                raise problem
            case NodeKind.DECODE:
                await decode_alone(node)
                node.warmed(engine_id)

    def _pairs_with(self, node: Node) -> list[tuple[Node, Node]]:
        """Each (P, D) of the node and one of its partners, those first that serve already."""
        others = [it for it in self._pool.nodes if it.answers and it.kind is not node.kind]
        others.sort(key=lambda it: (not it.is_available, it.num_in_flight))
        partners = others[:MAX_PARTNERS]
        match node.kind:
            case NodeKind.PREFILL:
                return [(node, decode) for decode in partners]
            case NodeKind.DECODE:
                return [(prefill, node) for prefill in partners]
