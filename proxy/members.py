"""Nodes that register by themselves, and their leases.

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
)
from engine.types import Label
from proxy.backends.worker import Backend, WorkerUrl
from proxy.cluster.node import NOT_YET, Node, NodeKind, Stage
from proxy.cluster.node_pool import NodePool
from proxy.warming import Warming
from serving.rpc.node_http import HTTP_SCHEMES
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import MembershipServicer, add_MembershipServicer_to_server
from serving.tls import ClientTls, client_tls

log = structlog.get_logger()

LEASE_S: Final = 15.0
"""A member joins again after a third of it."""
MAX_MEMBERS: Final = 1024
SWEEP_S: Final = 0.5


class _Join(msgspec.Struct, frozen=True):
    """A JoinRequest whose fields are bounded."""

    engine_id: Label
    kind: NodeKind
    url: Label


@dataclass(slots=True, eq=False)
class _Member:
    """A registered node; `until` ends its lease, in event-loop time."""

    node: Node
    engine_id: str
    until: float


class Members(MembershipServicer):
    """The gRPC service, and the owner of the nodes that came by it, until `close`.

    `ca_certs`: authorities for nodes that speak TLS, None for the machine's.
    """

    def __init__(self, pool: NodePool, warming: Warming, *, ca_certs: str | None) -> None:
        self._pool = pool
        self._warming = warming
        self._ca_certs = ca_certs
        self._tls: ClientTls | None = None
        self._members: dict[str, _Member] = {}
        # One at a time: two Joins of one node must not add it twice.
        self._changing = asyncio.Lock()

    def register(self, server: aio.Server) -> None:
        add_MembershipServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def drain(self) -> None:
        """Calls are short: nothing has to end."""

    def stages(self) -> dict[str, str]:
        """By label the stage of every node, also of those that the proxy's options name."""
        return {node.label: node.stage for node in self._pool.nodes}

    async def Join(
        self, request: pb.JoinRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.JoinReply:
        try:
            asked = {"engine_id": request.engine_id, "kind": request.kind, "url": request.url}
            join = msgspec.convert(asked, _Join)
            url = WorkerUrl.parse(join.url)
        except (msgspec.ValidationError, ConfigError) as error:
            raise InvalidRequestError(f"a node cannot join so: {error}") from error
        if url.backend is Backend.TANDEM and url.url.scheme in HTTP_SCHEMES:
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
        """Forgets who is gone, as long as the proxy lives."""
        while True:
            await asyncio.sleep(SWEEP_S)
            async with self._changing:
                await self._sweep()

    async def _sweep(self) -> None:
        for member in list(self._members.values()):
            if self._is_gone(member):
                await self._forget(member)

    async def _joined(self, join: _Join, url: WorkerUrl) -> tuple[Node, str]:
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
        return member.node, member.node.problem or self._warming.problem_of(member.node)

    async def _tls_for(self, url: WorkerUrl) -> ClientTls | None:
        if url.url.has_tls and self._tls is None:
            # Reads the machine's authorities, which takes time.
            self._tls = await asyncio.to_thread(client_tls, self._ca_certs)
        return self._tls if url.url.has_tls else None

    def _is_gone(self, member: _Member) -> bool:
        node = member.node
        if node.stage is Stage.LEAVING:
            return not node.num_in_flight
        return not node.answers and asyncio.get_running_loop().time() > member.until

    async def _forget(self, member: _Member) -> None:
        log.info("node is forgotten", node=member.node.name, engine_id=member.engine_id)
        await self._warming.forget(member.node)
        del self._members[member.node.name]
        await self._pool.remove(member.node)
