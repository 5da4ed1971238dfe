"""Client of a peer's `KvControl`."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Self

from connector.pd.wire.messages import (
    ANY_GENERATION,
    Digests,
    DigestsQuestion,
    Handshake,
    HeldBlocks,
)
from serving.rpc.channel import ProvingChannel
from serving.rpc.convert import from_pb, to_pb
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import KvControlStub
from serving.tls import ClientTls


class ControlClient:
    """One channel to one peer, on the event loop that made it. Its owner must `close` it.

    `timeout_s` bounds each call, and `left_s` those for digests, where a read has less time left.

    All methods raise what `ProvingChannel.call` does, and what the peer raised
    (`KVTransferParamsError` for an unknown or expired request or incarnation).
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None,
        caller_engine_id: str,
        timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self.address = address
        self._caller_engine_id = caller_engine_id
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._channel = ProvingChannel(address, token=token, tls=tls)
        self._stub = KvControlStub(self._channel.grpc)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def handshake(self, wanted: Sequence[str] = ()) -> Handshake:
        """`wanted`: transports of which the peer is to serve one, where no other reaches it."""
        request = pb.HandshakeRequest(engine_id=self._caller_engine_id, transports=wanted)
        reply = await self._channel.call(self._stub.Handshake, request, self._timeout_s)
        return from_pb(reply, Handshake)

    async def claim(self, engine_id: str, request_id: str) -> HeldBlocks:
        """`engine_id` is the incarnation that is meant; another one at the same address refuses."""
        request = pb.ClaimRequest(
            engine_id=engine_id, request_id=request_id, caller_engine_id=self._caller_engine_id
        )
        reply = await self._channel.call(self._stub.Claim, request, self._timeout_s)
        return HeldBlocks(
            num_tokens=reply.num_tokens,
            block_ids=tuple(tuple(group.ids) for group in reply.groups),
            generation=reply.generation,
        )

    async def renew(
        self, engine_id: str, request_ids: Sequence[str], generations: Sequence[int]
    ) -> tuple[str, ...]:
        """Extend the leases of `request_ids`; returns those that are lost already."""
        request = pb.RenewRequest(
            engine_id=engine_id,
            caller_engine_id=self._caller_engine_id,
            request_ids=request_ids,
            generations=generations,
        )
        reply = await self._channel.call(self._stub.Renew, request, self._timeout_s)
        return tuple(reply.lost_request_ids)

    async def release(
        self, engine_id: str, request_id: str, *, reason: str, generation: int = ANY_GENERATION
    ) -> bool:
        """End a lease; true when it was still alive."""
        request = pb.ReleaseRequest(
            engine_id=engine_id, request_id=request_id, reason=reason, generation=generation
        )
        reply = await self._channel.call(self._stub.Release, request, self._timeout_s)
        return bool(reply.was_alive)

    async def digests(self, question: DigestsQuestion, left_s: float = math.inf) -> Digests:
        """Digests of a held prefill; the peer refuses once it has released it."""
        request, timeout_s = to_pb(question, pb.DigestsRequest), min(self._timeout_s, left_s)
        reply = await self._channel.call(self._stub.Digests, request, timeout_s)
        return tuple(tuple(blocks.digests) for blocks in reply.ranges)

    @contextmanager
    def asking_digests(
        self, question: DigestsQuestion, left_s: float = math.inf
    ) -> Iterator[Future[Digests]]:
        """The same for another thread, which may read while the peer hashes; cancelled at the end.

        The event loop must run until then.
        """
        asked = asyncio.run_coroutine_threadsafe(self.digests(question, left_s), self._loop)
        try:
            yield asked
        finally:
            asked.cancel()
