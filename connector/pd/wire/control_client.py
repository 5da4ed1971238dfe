"""Synchronous client of a peer's `KvControl`, for the threads that pull.

Every call has a deadline; every failure is a leaf of the error tree.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from connector.pd.wire.messages import (
    ANY_GENERATION,
    Digests,
    DigestsQuestion,
    Handshake,
    HeldBlocks,
)
from engine.errors import AuthenticationError
from serving.rpc.channel import OPTIONS, PROVE_TIMEOUT_S, no_proof
from serving.rpc.convert import from_pb, to_pb
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import IdentityStub, KvControlStub
from serving.rpc.proof import NOT_NEEDED, CallerProof, Proven, unproven
from serving.rpc.status import error_from_status
from serving.tls import ClientTls


class ControlClient:
    """One channel to one peer; safe to use from several threads. Its owner must `close` it.

    `timeout_s` bounds each call, and `left_s` those for digests, where a read has less time left.

    All methods raise `UnavailableError` when the peer is away, `DeadlineExceededError` when it is
    late, `UnprovenPeerError` when it does not know the token, and otherwise what the peer raised
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
        self._token = token
        self._proven: Proven | None = None
        self._proving = threading.Lock()
        self._channel = (
            grpc.insecure_channel(address, options=OPTIONS)
            if tls is None
            else grpc.secure_channel(
                address, grpc.ssl_channel_credentials(tls.authorities), options=OPTIONS
            )
        )
        self._identity = IdentityStub(self._channel)  # type: ignore[no-untyped-call]
        self._stub = KvControlStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._channel.close()

    def handshake(self, wanted: Sequence[str] = ()) -> Handshake:
        """`wanted`: transports of which the peer is to serve one, where no other reaches it."""
        request = pb.HandshakeRequest(engine_id=self._caller_engine_id, transports=wanted)
        reply: pb.HandshakeReply = self._call(self._stub.Handshake, request)
        return from_pb(reply, Handshake)

    def claim(self, engine_id: str, request_id: str) -> HeldBlocks:
        """`engine_id` is the incarnation that is meant; another one at the same address refuses."""
        request = pb.ClaimRequest(
            engine_id=engine_id, request_id=request_id, caller_engine_id=self._caller_engine_id
        )
        reply: pb.ClaimReply = self._call(self._stub.Claim, request)
        return HeldBlocks(
            num_tokens=reply.num_tokens,
            block_ids=tuple(tuple(group.ids) for group in reply.groups),
            generation=reply.generation,
        )

    def renew(
        self, engine_id: str, request_ids: Sequence[str], generations: Sequence[int]
    ) -> tuple[str, ...]:
        """Extend the leases of `request_ids`; returns those that are lost already."""
        request = pb.RenewRequest(
            engine_id=engine_id,
            caller_engine_id=self._caller_engine_id,
            request_ids=request_ids,
            generations=generations,
        )
        reply: pb.RenewReply = self._call(self._stub.Renew, request)
        return tuple(reply.lost_request_ids)

    def release(
        self, engine_id: str, request_id: str, *, reason: str, generation: int = ANY_GENERATION
    ) -> bool:
        """End a lease; true when it was still alive."""
        request = pb.ReleaseRequest(
            engine_id=engine_id, request_id=request_id, reason=reason, generation=generation
        )
        reply: pb.ReleaseReply = self._call(self._stub.Release, request)
        return reply.was_alive

    def digests(self, question: DigestsQuestion, left_s: float = math.inf) -> Digests:
        """Digests of a held prefill; the peer refuses once it has released it."""
        request = to_pb(question, pb.DigestsRequest)
        return _digests_of(self._call(self._stub.Digests, request, left_s))

    @contextmanager
    def asking_digests(
        self, question: DigestsQuestion, left_s: float = math.inf
    ) -> Iterator[Callable[[], Digests]]:
        """The same, asynchronously: yields a call that waits for the answer; cancelled at the end.

        Costs a third of a millisecond, for a thread of gRPC's.
        """
        message, timeout_s = to_pb(question, pb.DigestsRequest), min(self._timeout_s, left_s)
        # Begun now, so that the peer hashes while the caller reads.
        proven = self._proof(timeout_s)
        call = self._stub.Digests.future(message, timeout=timeout_s, metadata=proven.metadata)

        def answer() -> Digests:
            try:
                with _errors_of(self.address):
                    reply = call.result()
                    self._check(call, proven)
                    return _digests_of(reply)
            except AuthenticationError:
                return self.digests(question, left_s)

        try:
            yield answer
        finally:
            call.cancel()

    def _call(self, method: Any, request: Any, left_s: float = math.inf) -> Any:
        """The reply of `method`, with one more try for a peer that has restarted."""
        timeout_s = min(self._timeout_s, left_s)
        proven = self._proof(timeout_s)
        try:
            return self._call_once(method, request, proven, timeout_s=timeout_s)
        except AuthenticationError:
            if self._token is None:
                raise
            self._forget(proven)
        # Once more with a new proof. If another process answers, it says so itself (`engine_id`).
        return self._call_once(method, request, self._proof(timeout_s), timeout_s=timeout_s)

    def _call_once(self, method: Any, request: Any, proven: Proven, *, timeout_s: float) -> Any:
        with _errors_of(self.address):
            reply, call = method.with_call(request, timeout=timeout_s, metadata=proven.metadata)
        self._check(call, proven)
        return reply

    def _check(self, call: grpc.Call, proven: Proven) -> None:
        """gRPC connects again by itself, perhaps to another process, and does not say so."""
        if self._token is not None and not proven.is_reply(call.trailing_metadata() or ()):
            self._forget(proven)
            raise unproven(self.address, "another process has its port")

    def _proof(self, timeout_s: float) -> Proven:
        if self._token is None:
            return NOT_NEEDED
        with self._proving:
            if self._proven is None:
                proof = CallerProof(self._token, self.address)
                self._proven = self._prove(proof, min(timeout_s, PROVE_TIMEOUT_S))
            return self._proven

    def _prove(self, proof: CallerProof, timeout_s: float) -> Proven:
        try:
            return proof.check(
                self._identity.Prove(pb.ProveRequest(), timeout=timeout_s, metadata=proof.question)
            )
        except grpc.RpcError as error:
            raise no_proof(error.code(), error.details(), self.address) from error

    def _forget(self, proven: Proven) -> None:
        with self._proving:
            # Another thread may have proven the new process already: its proof stays.
            self._proven = None if self._proven is proven else self._proven


def _digests_of(reply: pb.DigestsReply) -> Digests:
    return tuple(tuple(blocks.digests) for blocks in reply.ranges)


@contextmanager
def _errors_of(address: str) -> Iterator[None]:
    """Failures of calls to `address` as leaves of the error tree."""
    try:
        yield
    except grpc.RpcError as error:
        metadata = [(item.key, item.value) for item in error.trailing_metadata() or ()]
        details = f"{error.details()} (peer {address})"
        raise error_from_status(error.code(), details, metadata) from error
