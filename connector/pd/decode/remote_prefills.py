"""The reader's side of leases: what a peer holds for it, renewed until pulled or given up.

From the acceptance of a request until its end there is one claim; whoever ends it first releases
the peer's lease. The peer is P, whose signed answer names its lease, and its blocks unless they are
very many: it need not be asked before they are read, since its lease's record vouches for them. On
the way back the peer is D, which keeps a turn for nobody in particular: it is asked first.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import structlog

from connector.pd import causes
from connector.pd.decode.fair_pool import FairPool, PoolLimits
from connector.pd.decode.peer_registry import Peer, PeerAddress, PeerRegistry
from connector.pd.metrics import TransferMetrics
from connector.pd.wire.messages import ANY_GENERATION, HeldBlocks
from engine.errors import (
    DeadlineExceededError,
    KVTransferParamsError,
    LateReadError,
    OverloadedError,
    TandemError,
    TransportError,
    UnavailableError,
)
from engine.hand_over_problems import HandOverProblems
from engine.rpc.address import join_host_port
from engine.types import KVTransferParams, KVTransferStats

log = structlog.get_logger()

CONTROL_LIMITS = PoolLimits(total=16, per_peer=4, waiting=16_384)
FIRST_LIMITS = PoolLimits(total=32, per_peer=1, waiting=16_384, peers=32)
"""To addresses where nobody has answered yet. Those that are silent keep these threads, and none
that talk to known peers; a new peer waits for two timeouts at most, or is refused at once."""
RENEWALS_PER_LEASE = 6


@dataclass(slots=True, eq=False)
class PrefillClaim:
    """One accepted remote prefill, or turn before.

    `answer`: the peer's, when it was asked for its blocks. `failure` says why it will not be pulled
    (the prompt is then computed here); `ended` that nobody needs it.
    """

    request_id: str
    params: KVTransferParams
    lock: threading.Lock = field(default_factory=threading.Lock)
    peer: Peer | None = None
    answer: HeldBlocks | None = None
    failure: str | None = None
    ended: bool = False
    stats: KVTransferStats | None = None

    @property
    def remote_request_id(self) -> str:
        """P's name of the prefill."""
        return self.params.remote_request_id or ""

    @property
    def engine_id(self) -> str:
        """The incarnation that holds it."""
        return self.params.remote_engine_id or ""

    @property
    def address(self) -> PeerAddress:
        """Where that incarnation's control service is."""
        return self.params.remote_host or "", self.params.remote_port or 0

    @property
    def prompt_digest(self) -> str:
        """Of the request's own tokens: at the door, what was signed has been compared with it."""
        return self.params.remote_prompt_digest or ""

    @property
    def must_ask(self) -> bool:
        """Whether only the peer can say where its blocks are, if it holds them at all."""
        return self.params.is_return_pull or self.params.remote_block_ids is None

    @property
    def stands(self) -> bool:
        """Whether it may still be pulled."""
        return not self.ended and self.failure is None

    def fail(self, cause: str) -> None:
        """It will not be pulled; the first cause stays, whoever finds another one later."""
        with self.lock:
            self.failure = self.failure or cause

    @property
    def generation(self) -> int:
        """Of the peer's lease."""
        answered = self.answer.generation if self.answer else ANY_GENERATION
        return self.params.remote_generation or answered

    def offsets(self, peer: Peer) -> tuple[tuple[int, ...], ...]:
        """By group, where its blocks begin in the arena of `peer`.

        Raises TransportError when it has other groups than it names blocks of, and LateReadError
        when it held them no more as it was asked for them.
        """
        if self.answer is not None:
            return self.answer.groups
        named = self.params.remote_block_ids
        if named is None:
            raise LateReadError(
                f"{self.engine_id} held {self.remote_request_id} no more when asked"
            )
        if len(named) != len(peer.groups):
            raise TransportError(
                f"{self.engine_id} has {len(peer.groups)} KV cache groups, but names {len(named)}"
            )
        pairs = zip(peer.groups, named, strict=True)
        return tuple(tuple(map(group.offset, blocks)) for group, blocks in pairs)

    @property
    def num_tokens(self) -> int:
        """Tokens that the peer has computed."""
        return self.params.remote_num_tokens or 0


class RemotePrefills:
    """Owner of all claims of a node and of the threads that talk to prefill nodes about them."""

    def __init__(self, peers: PeerRegistry, lease_s: float, metrics: TransferMetrics) -> None:
        self.problems = HandOverProblems()
        self._peers = peers
        self._metrics = metrics
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._claims: dict[str, PrefillClaim] = {}
        self._stopping = threading.Event()
        self._pause = threading.Event()
        self._control = FairPool(CONTROL_LIMITS, "kv-control")
        self._first = FairPool(FIRST_LIMITS, "kv-first")
        self._renewer = threading.Thread(target=self._renew_regularly, name="kv-renew", daemon=True)
        self._renewer.start()

    def __len__(self) -> int:
        return len(self._claims)

    def get(self, request_id: str) -> PrefillClaim | None:
        """The claim of a request, if it has one."""
        with self._lock:
            return self._claims.get(request_id)

    def begin(self, claim: PrefillClaim) -> Future[None] | None:
        """None: it stands. Otherwise the peer is asked on a control thread, and may refuse.

        Raises OverloadedError when too many messages to peers wait already; the claim is known.
        """
        with self._lock:
            self._claims[claim.request_id] = claim
        if self._stands_at_once(claim):
            return None
        return self._submit(claim.address, partial(self._ask, claim))

    def end(self, request_id: str) -> PrefillClaim | None:
        """Forgets a claim; P's lease is released in the background if it is still ours."""
        with self._lock:
            claim = self._claims.pop(request_id, None)
        if claim is not None:
            self.settle(claim)
        return claim

    def decline(self, claim: PrefillClaim) -> None:
        """It will not begin: the peer's lease ends now, in the background."""
        try:
            self._submit(claim.address, partial(self._decline, claim))
        except OverloadedError as error:
            log.warning("a lease is left to run out", peer=claim.engine_id, error=str(error))

    def settle(self, claim: PrefillClaim, reason: str = "given up") -> None:
        """Nobody will read any more: a lease that is still ours is released in the background."""
        with claim.lock:
            is_ours = not claim.ended and claim.peer is not None
            claim.ended = True
        if is_ours:
            self._tell(claim, reason)

    def failed(self, claim: PrefillClaim, cause: str, error: BaseException) -> None:
        """What the peer has computed will not be had: it is computed here, or the request fails.

        That is held against the peer unless it says nothing of others that the peer holds.
        """
        claim.fail(cause)
        self._metrics.failed.inc()
        self._metrics.hand_over_failures(cause).inc()
        about = {"engine_id": claim.engine_id, "address": join_host_port(*claim.address)}
        if cause in causes.OF_ONE_OBJECT:
            self.problems.note(cause, str(error), **about)
        else:
            lasting = cause == causes.PEER_DOES_NOT_FIT
            self.problems.failed(**about, cause=cause, detail=str(error), lasting=lasting)

    def worked(self, claim: PrefillClaim) -> None:
        """What the peer has computed was had."""
        self.problems.worked(claim.engine_id, join_host_port(*claim.address))

    def forget(self, peer: Peer) -> None:
        """Something with `peer` failed: the next claim shakes hands again."""
        self._peers.forget(peer)

    def close(self) -> None:
        """Gives every claim up and stops the threads."""
        self._stopping.set()
        self._pause.set()
        for request_id in list(self._claims):
            self.end(request_id)
        self._renewer.join()
        self._first.close()
        self._control.close()

    def _stands_at_once(self, claim: PrefillClaim) -> bool:
        """A prefill of a node that is known, which has named its blocks."""
        if claim.must_ask:
            return False
        claim.peer = self._peers.at_hand(*claim.address, claim.engine_id)
        return claim.peer is not None

    def _decline(self, claim: PrefillClaim) -> None:
        name, generation = claim.remote_request_id, claim.generation
        self._peers.decline(claim.address, claim.engine_id, name, generation=generation)

    def _submit(self, address: PeerAddress, call: Callable[[], None]) -> Future[None]:
        """Where somebody has answered before, among the messages to known peers."""
        pool = self._control if self._peers.has_met(address) else self._first
        return pool.submit(join_host_port(*address), call)

    def _ask(self, claim: PrefillClaim) -> None:
        if self._stopping.is_set():
            raise UnavailableError("this node is stopping")
        try:
            peer = self._peers.acquire(*claim.address, claim.engine_id)
        except TransportError:
            self._decline(claim)
            raise
        if claim.must_ask:
            self._ask_for_blocks(claim, peer)
        with claim.lock:
            claim.peer = peer
            came_too_late = claim.ended
        if peer.lease_s < self._lease_s:
            self._pause.set()  # the renewer may be about to wait for longer than this peer allows
        if came_too_late:
            self._end_lease(claim, "given up")
        if claim.answer is not None and claim.answer.num_tokens != claim.num_tokens:
            raise KVTransferParamsError(
                f"{claim.engine_id} holds {claim.answer.num_tokens} tokens of "
                f"{claim.remote_request_id}, not {claim.num_tokens}; send its object as it is",
                code="mismatched_kv_transfer_params",
            )

    def _ask_for_blocks(self, claim: PrefillClaim, peer: Peer) -> None:
        """A turn that nobody has claimed D may take back at any time: that is refused.

        A prefill that is not held any more stays without an answer, and its pull comes too late.
        """
        try:
            claim.answer = peer.control.claim(
                peer.engine_id, claim.remote_request_id, timeout_s=peer.timeout_s
            )
        except KVTransferParamsError:
            if claim.params.is_return_pull:
                self._peers.release(peer)
                raise
        except BaseException as error:
            self._lost(peer, error)
            self._peers.release(peer)
            raise

    def _tell(self, claim: PrefillClaim, reason: str) -> None:
        peer = claim.peer
        assert peer is not None
        try:
            self._control.submit(peer.engine_id, partial(self._end_lease, claim, reason))
        except OverloadedError as error:
            self._peers.release(peer)
            log.warning("a lease is left to run out", peer=peer.engine_id, error=str(error))

    def _begin_renewal(self, peer: Peer, claims: list[PrefillClaim]) -> None:
        try:
            self._control.submit(peer.engine_id, partial(self._renew, peer, claims))
        except OverloadedError as error:
            self._peers.release(peer)
            log.warning("leases are not renewed", peer=peer.engine_id, error=str(error))

    def _end_lease(self, claim: PrefillClaim, reason: str) -> None:
        """Best effort: if P does not hear it, the lease runs out by itself."""
        peer = claim.peer
        assert peer is not None
        try:
            peer.control.release(
                peer.engine_id,
                claim.remote_request_id,
                reason=reason,
                generation=claim.generation,
                timeout_s=peer.timeout_s,
            )
        except TandemError as error:
            self._metrics.failed_notifications.inc()
            self._lost(peer, error)
            log.info("could not release a lease", peer=peer.engine_id, error=str(error))
        finally:
            self._peers.release(peer)

    def _lost(self, peer: Peer, error: BaseException) -> None:
        if isinstance(error, UnavailableError | DeadlineExceededError):
            self._peers.forget(peer)

    def _renew_regularly(self) -> None:
        """One message per peer and interval, on control threads: a silent peer delays no other.

        A peer without claims gets one too: when it has died, its arena must not stay mapped here.
        """
        while not self._pause_is_last():
            for peer, claims in self._by_peer():
                if self._peers.hold(peer):
                    self._begin_renewal(peer, claims)

    def _pause_is_last(self) -> bool:
        """Waits until it is time to renew; whether the node stops instead."""
        self._pause.wait(self._interval_s())
        self._pause.clear()
        return self._stopping.is_set()

    def _interval_s(self) -> float:
        """As often as the shortest lease needs, ours or that of a peer that is here."""
        leases = (self._lease_s, *(peer.lease_s for peer in self._peers.known()))
        return min(leases) / RENEWALS_PER_LEASE

    def _by_peer(self) -> Iterable[tuple[Peer, list[PrefillClaim]]]:
        """Every known peer with its claims to renew; one that is gone while it has any."""
        by_peer: dict[int, tuple[Peer, list[PrefillClaim]]]
        by_peer = {id(peer): (peer, []) for peer in self._peers.known()}
        with self._lock:
            claims = list(self._claims.values())
        for claim in claims:
            if claim.peer is not None and not claim.ended and claim.failure is None:
                by_peer.setdefault(id(claim.peer), (claim.peer, []))[1].append(claim)
        return by_peer.values()

    def _renew(self, peer: Peer, claims: list[PrefillClaim]) -> None:
        ids = [claim.remote_request_id for claim in claims]
        try:
            generations = [claim.generation for claim in claims]
            lost = set(
                peer.control.renew(
                    peer.engine_id, ids, generations=generations, timeout_s=peer.timeout_s
                )
            )
        except TandemError as error:
            self._metrics.failed_notifications.inc()
            self._peers.forget(peer)
            log.warning("a peer is gone", peer=peer.engine_id, error=str(error), claims=len(ids))
            return
        finally:
            self._peers.release(peer)
        for claim in claims:
            if claim.remote_request_id in lost and not claim.ended:
                claim.fail(causes.LEASE_LOST)
