"""D's side of leases: which prefills a peer holds for this node, from acceptance to the end.

The peer is P, whose signed answer names its lease and, unless they are very many, its blocks: P
need not be asked before they are read, since the record of its lease vouches for them. On the way
back the peer is a D that keeps a turn for nobody in particular: it must be asked (`Claim`) first.
"""

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from connector.pd import causes
from connector.pd.decode.peer_calls import Call, PeerCalls
from connector.pd.decode.peer_registry import Peer, PeerAddress, PeerRegistry
from connector.pd.decode.pull_plan import PullPlan
from connector.pd.metrics import TransferMetrics
from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.messages import ANY_GENERATION, BlockIds, HeldBlocks
from engine.errors import (
    DeadlineExceededError,
    KVTransferParamsError,
    OverloadedError,
    TandemError,
    TransportError,
    UnavailableError,
)
from engine.types import KVTransferParams, KVTransferStats
from serving.hand_over_problems import HandOverProblems
from serving.rpc.address import join_host_port

log = structlog.get_logger()

RENEWALS_PER_LEASE = 6


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """One prefill, or turn before, that a peer holds for a request of this node.

        accepted ----> claimed ----> ended: pulled, not needed, or its request is over;
            |             |            ^     whoever sets `ended` releases the peer's lease
            +-------------+-> failed --+     `failure`: the cause; the prompt is computed here

    `lock` guards `peer`, `failure` and `ended`. It is innermost: nothing is called under it.

    `peer`: set when claimed; one use of it in the registry belongs to this object until the lease
    is released. `block_ids`: by the peer's KV cache groups; None until the peer is asked, or if it
    no longer held them then. `stats`: of the pull, for the client.
    """

    request_id: str
    params: KVTransferParams
    lock: threading.Lock = field(default_factory=threading.Lock)
    peer: Peer | None = None
    block_ids: BlockIds | None = None
    generation: int = ANY_GENERATION
    failure: str | None = None
    ended: bool = False
    stats: KVTransferStats | None = None

    def __post_init__(self) -> None:
        self.generation = self.params.remote_generation or ANY_GENERATION
        if not self.params.is_return_pull:
            self.block_ids = self.params.remote_block_ids

    @property
    def remote_request_id(self) -> str:
        """The peer's id of the request."""
        return self.params.remote_request_id or ""

    @property
    def engine_id(self) -> str:
        """The incarnation that holds it."""
        return self.params.remote_engine_id or ""

    @property
    def address(self) -> PeerAddress:
        """Host and port of that incarnation's control service."""
        return self.params.remote_host or "", self.params.remote_port or 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the peer has computed."""
        return self.params.remote_num_tokens or 0

    @property
    def can_be_pulled(self) -> bool:
        return not self.ended and self.failure is None

    def fail(self, cause: str) -> None:
        """Marks it as not to be pulled. The first cause stays."""
        with self.lock:
            self.failure = self.failure or cause

    async def release(self, control: ControlClient, reason: str) -> None:
        """Ends its lease at the peer. Raises TandemError if the peer does not hear it."""
        await control.release(
            self.engine_id, self.remote_request_id, reason=reason, generation=self.generation
        )

    def set_stats(
        self,
        num_local_tokens: int,
        pulled: PullPlan | None = None,
        *,
        seconds: float = 0.0,
        verified: bool = False,
    ) -> None:
        """Tells the client what `pulled` moved until now, after `num_local_tokens` here."""
        num_remote_tokens = self.params.remote_num_cached_tokens or 0
        cached = num_remote_tokens, num_local_tokens
        if self.params.is_return_pull:  # this node is P, and the peer D
            cached = num_local_tokens, num_remote_tokens
        self.stats = KVTransferStats(
            attention_bytes=pulled.attention_bytes if pulled else 0,
            state_bytes=pulled.state_bytes if pulled else 0,
            transfer_ms=1e3 * seconds,
            prefill_cached_tokens=cached[0],
            decode_cached_tokens=cached[1],
            verified=verified,
            started_at=time.time() - seconds if pulled else 0.0,
        )


class RemotePrefills:
    """Owner of a node's remote prefills and of the calls to peers about them.

    Made on the event loop, where calls run. Of its methods `get`, `all`, `end`, `settle`, `failed`,
    `worked` and `forget` may be called from any thread. `_lock` guards the table and nothing else;
    no other lock is taken under it.
    """

    def __init__(self, peers: PeerRegistry, lease_s: float, metrics: TransferMetrics) -> None:
        self.problems = HandOverProblems()
        self._peers = peers
        self._metrics = metrics
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._by_request: dict[str, RemotePrefill] = {}
        self._is_stopping = False
        self._renew_now = asyncio.Event()
        self._calls = PeerCalls()
        self._loop = asyncio.get_running_loop()
        self._renewer = self._loop.create_task(self._renew_regularly())

    def get(self, request_id: str) -> RemotePrefill | None:
        with self._lock:
            return self._by_request.get(request_id)

    def all(self) -> list[RemotePrefill]:
        """Every remote prefill whose request is not over."""
        with self._lock:
            return list(self._by_request.values())

    def claim(self, prefill: RemotePrefill) -> asyncio.Task[None] | None:
        """None: it is claimed. Otherwise the task asks the peer, which may refuse.

        Raises OverloadedError when too many messages to peers wait; `end` it all the same.
        """
        with self._lock:
            self._by_request[prefill.request_id] = prefill
        if prefill.block_ids is not None:
            # The peer has named its blocks: if it is known, no message is needed.
            prefill.peer = self._peers.at_hand(*prefill.address, prefill.engine_id)
            if prefill.peer is not None:
                return None
        return self._submit(prefill.address, partial(self._claim, prefill))

    def check(self, prefill: RemotePrefill) -> asyncio.Task[None]:
        """Shakes hands with its peer, unless that is known, and claims nothing.

        The task raises TransportError if the two nodes do not fit; then the lease is released.
        Raises OverloadedError when too many messages to peers wait; `end` it all the same.
        """
        with self._lock:
            self._by_request[prefill.request_id] = prefill
        return self._submit(prefill.address, partial(self._check, prefill))

    def end(self, request_id: str) -> RemotePrefill | None:
        """Forgets it: its request is over. A lease that is still ours is released."""
        with self._lock:
            prefill = self._by_request.pop(request_id, None)
        if prefill is not None:
            self.settle(prefill)
        return prefill

    def decline(self, prefill: RemotePrefill) -> None:
        """Ends the peer's lease in the background, since nobody will claim it."""
        try:
            self._submit(prefill.address, partial(self._decline, prefill))
        except OverloadedError as error:
            log.warning("a lease is left to run out", peer=prefill.engine_id, error=str(error))

    def settle(self, prefill: RemotePrefill, reason: str = "given up") -> None:
        """Nobody will read it now: a lease that is still ours is released in the background."""
        with prefill.lock:
            # While it is being claimed, `peer` is None and `_claim` finds `ended`: one of the two
            # sees both, and releases.
            peer = None if prefill.ended else prefill.peer
            prefill.ended = True
        if peer is not None:
            release = partial(self._release, prefill, peer, reason)
            self._loop.call_soon_threadsafe(self._tell, peer, release)

    def failed(self, prefill: RemotePrefill, cause: str, error: BaseException) -> None:
        """It cannot be had: it is computed here, or the request fails.

        That counts against the peer, unless the cause says nothing of what else it holds.
        """
        prefill.fail(cause)
        self._metrics.failed.inc()
        self._metrics.hand_over_failures(cause).inc()
        about = {"engine_id": prefill.engine_id, "address": join_host_port(*prefill.address)}
        if cause in causes.OF_ONE_OBJECT:
            self.problems.note(cause, str(error), **about)
        else:
            lasting = cause == causes.PEER_DOES_NOT_FIT
            self.problems.failed(**about, cause=cause, detail=str(error), lasting=lasting)

    def worked(self, prefill: RemotePrefill) -> None:
        """Forgets earlier failures with this peer, since a pull has worked."""
        self.problems.worked(prefill.engine_id, join_host_port(*prefill.address))

    def forget(self, peer: Peer) -> None:
        """Something with `peer` failed: the next claim shakes hands again."""
        self._loop.call_soon_threadsafe(self._peers.forget, peer)

    async def close(self) -> None:
        """Ends all of them, and returns when the peers have heard of it or did not answer."""
        self._is_stopping = True
        self._renewer.cancel()
        for prefill in self.all():
            self.end(prefill.request_id)
        # Once around the loop: what threads have asked for has begun.
        await asyncio.sleep(0)
        await self._calls.close()

    def _submit(self, address: PeerAddress, call: Call) -> asyncio.Task[None]:
        is_stranger = not self._peers.has_met(address)
        return self._calls.start(join_host_port(*address), call, is_stranger=is_stranger)

    def _tell(self, peer: Peer, call: Call) -> None:
        """Starts `call`, which gives one use of `peer` back.

        If too many wait, only the use is given back: the lease runs out by itself.
        """
        try:
            self._calls.start(peer.engine_id, call)
        except OverloadedError as error:
            self._peers.release(peer)
            log.warning("leases are left to run out", peer=peer.engine_id, error=str(error))

    async def _decline(self, prefill: RemotePrefill) -> None:
        """Nobody here will read it: without a word its lease would have to run out."""
        try:
            async with self._peers.control_of(*prefill.address) as control:
                await prefill.release(control, "refused")
        except TandemError as error:
            peer = prefill.engine_id
            log.info("a declined prefill is left to its lease", peer=peer, error=str(error))

    async def _meet(self, prefill: RemotePrefill) -> Peer:
        if self._is_stopping:
            raise UnavailableError("this node is stopping")
        try:
            return await self._peers.acquire(*prefill.address, prefill.engine_id)
        except TransportError:
            await self._decline(prefill)  # the two nodes do not fit: it will never be read
            raise

    async def _check(self, prefill: RemotePrefill) -> None:
        self._peers.release(await self._meet(prefill))

    async def _claim(self, prefill: RemotePrefill) -> None:
        peer = await self._meet(prefill)
        held = await self._held_by(peer, prefill) if prefill.block_ids is None else None
        if held is not None:
            prefill.block_ids = held.block_ids
            prefill.generation = prefill.generation or held.generation
        with prefill.lock:
            prefill.peer = peer
            ended = prefill.ended
        if peer.lease_s < self._lease_s:
            self._renew_now.set()  # the renewer may be about to wait for longer than it allows
        if ended:
            await self._release(prefill, peer, "given up")
        if held is not None and held.num_tokens != prefill.num_tokens:
            raise KVTransferParamsError(
                f"{prefill.engine_id} holds {held.num_tokens} tokens of "
                f"{prefill.remote_request_id}, not {prefill.num_tokens}; send its object as it is",
                code="mismatched_kv_transfer_params",
            )

    async def _held_by(self, peer: Peer, prefill: RemotePrefill) -> HeldBlocks | None:
        """The peer's blocks; None for a prefill that it no longer holds: its pull is too late.

        A turn that nobody has claimed may be gone at any time: that is refused at once.
        """
        try:
            return await peer.control.claim(peer.engine_id, prefill.remote_request_id)
        except BaseException as error:
            if isinstance(error, KVTransferParamsError) and not prefill.params.is_return_pull:
                return None
            self._forget_if_silent(peer, error)
            self._peers.release(peer)
            raise

    async def _release(self, prefill: RemotePrefill, peer: Peer, reason: str) -> None:
        """Best effort: if the peer does not hear it, the lease runs out by itself."""
        try:
            await prefill.release(peer.control, reason)
        except TandemError as error:
            self._metrics.failed_notifications.inc()
            self._forget_if_silent(peer, error)
            log.info("could not release a lease", peer=peer.engine_id, error=str(error))
        finally:
            self._peers.release(peer)

    def _forget_if_silent(self, peer: Peer, error: BaseException) -> None:
        if isinstance(error, UnavailableError | DeadlineExceededError):
            self._peers.forget(peer)

    async def _renew_regularly(self) -> None:
        """One message per peer and interval, each a task: a silent peer delays no other.

        A peer that holds nothing for us gets one too: if it has died, its arena is unmapped here.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s()):
                    await self._renew_now.wait()
            self._renew_now.clear()
            # Every known peer with what to renew there, and those that are gone but hold something.
            by_peer: dict[int, tuple[Peer, list[RemotePrefill]]]
            by_peer = {id(peer): (peer, []) for peer in self._peers.known()}
            for prefill in self.all():
                if prefill.peer is not None and prefill.can_be_pulled:
                    by_peer.setdefault(id(prefill.peer), (prefill.peer, []))[1].append(prefill)
            for peer, prefills in by_peer.values():
                if self._peers.hold(peer):
                    self._tell(peer, partial(self._renew, peer, prefills))

    def _interval_s(self) -> float:
        """As often as the shortest lease needs, ours or that of a peer that is known."""
        leases = (self._lease_s, *(peer.lease_s for peer in self._peers.known()))
        return min(leases) / RENEWALS_PER_LEASE

    async def _renew(self, peer: Peer, prefills: list[RemotePrefill]) -> None:
        ids = [prefill.remote_request_id for prefill in prefills]
        generations = [prefill.generation for prefill in prefills]
        try:
            lost = set(await peer.control.renew(peer.engine_id, ids, generations))
        except TandemError as error:
            self._metrics.failed_notifications.inc()
            self._peers.forget(peer)
            log.warning("a peer is gone", peer=peer.engine_id, error=str(error), prefills=len(ids))
            return
        finally:
            self._peers.release(peer)
        for prefill in prefills:
            if prefill.remote_request_id in lost and not prefill.ended:
                prefill.fail(causes.LEASE_LOST)
