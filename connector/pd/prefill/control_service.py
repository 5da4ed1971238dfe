"""The `KvControl` service of gRPC over a `ControlHandler`."""

import asyncio
import threading

from grpc import aio

from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.wire.messages import BlockRange
from serving.rpc.convert import from_pb, to_pb
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import KvControlServicer, add_KvControlServicer_to_server

CONCURRENT_DIGESTS = 2
"""Calls that hash at once; others wait without a thread, so that claims and renewals never do."""


class ControlService(KvControlServicer):
    """Runs the handler in worker threads, so that a lock never delays token streams."""

    def __init__(self, handler: ControlHandler) -> None:
        self._handler = handler
        self._hashing = asyncio.Semaphore(CONCURRENT_DIGESTS)

    def drain(self) -> None:
        """Its calls are short: peers may renew and release until the end."""

    def register(self, server: aio.Server) -> None:
        add_KvControlServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Handshake(self, request: pb.HandshakeRequest, context: object) -> pb.HandshakeReply:
        reply = await asyncio.to_thread(self._handler.handshake, tuple(request.transports))
        return to_pb(reply, pb.HandshakeReply)

    async def Claim(self, request: pb.ClaimRequest, context: object) -> pb.ClaimReply:
        held = await asyncio.to_thread(self._handler.claim, request.engine_id, request.request_id)
        groups = [pb.GroupBlocks(ids=ids) for ids in held.block_ids]
        return pb.ClaimReply(num_tokens=held.num_tokens, groups=groups, generation=held.generation)

    async def Renew(self, request: pb.RenewRequest, context: object) -> pb.RenewReply:
        ids, generations = tuple(request.request_ids), tuple(request.generations)
        lost = await asyncio.to_thread(self._handler.renew, request.engine_id, ids, generations)
        return pb.RenewReply(lost_request_ids=lost)

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseReply:
        was_alive = await asyncio.to_thread(
            self._handler.release,
            request.engine_id,
            request.request_id,
            request.reason,
            generation=request.generation,
        )
        return pb.ReleaseReply(was_alive=was_alive)

    async def Digests(self, request: pb.DigestsRequest, context: object) -> pb.DigestsReply:
        left = threading.Event()
        async with self._hashing:
            try:
                digests = await asyncio.to_thread(
                    self._handler.digests,
                    request.engine_id,
                    request.request_id,
                    request.generation,
                    ranges=[from_pb(asked, BlockRange) for asked in request.ranges],
                    left=left,
                )
            finally:
                left.set()
        return pb.DigestsReply(ranges=[pb.RangeDigests(digests=blocks) for blocks in digests])
