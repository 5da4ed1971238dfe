"""The prefill nodes that this node talks to: one handshake and one mapping per incarnation.

All of it runs on the event loop, but for what a transport does to connect.
"""

import asyncio
import ipaddress
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog

from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.geometry import GroupGeometry, check_geometry, groups_of
from connector.pd.wire.messages import Handshake
from connector.transports.auto import address_for
from connector.transports.base import Transport
from engine.errors import (
    DeadlineExceededError,
    KVTransferParamsError,
    OutOfReachError,
    TransportError,
    UnavailableError,
)
from serving.rpc.address import join_host_port
from serving.tls import ClientTls

log = structlog.get_logger()
PeerAddress = tuple[str, int]
_Result = TypeVar("_Result")

SILENCE_S = 5.0
"""An address that let a handshake run out of time is not asked again for so long."""
MAX_ADDRESSES = 256
"""Addresses that are remembered although nothing there is in use."""
CONNECTING = 8
"""Threads for peers that are being connected: to map memory takes time, and to connect may mean to
try."""
LEASE_S = (1.0, 86_400.0)
"""Bounds of a peer's lease time: renewals are neither too many nor too rare."""


@dataclass(slots=True)
class Peer:
    """One incarnation of a prefill node. `users` counts who may touch its mapping.

    `link`: its name for the transport. A node that answers at another address under the name of
    this one has another link, and what it says of its memory changes nothing here. `is_gone`: the
    peer did not answer, or another incarnation does. Gone without users it is dropped.
    """

    engine_id: str
    link: str
    control: ControlClient
    groups: tuple[GroupGeometry, ...]
    lease_s: float
    users: int = 1
    is_gone: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class _Entry:
    """One address and its peer; the lock serialises handshakes with it, and only with it.

    `num_asking`: tasks that want it. `silent_until`: a monotonic time.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    peer: Peer | None = None
    num_asking: int = 0
    silent_until: float = 0.0

    @property
    def is_idle(self) -> bool:
        """True if forgetting it loses nothing but the fact that somebody has answered there."""
        return not self.num_asking and (self.peer is None or self.peer.is_dropped)


class PeerRegistry:
    """Owner of control channels and transport connections; gives them back on `close`.

    `identity` describes this node; it is asked for once the node serves.
    """

    def __init__(
        self,
        identity: Callable[[], Handshake],
        transport: Transport,
        *,
        cluster_token: str | None,
        control_timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._token = cluster_token
        self._tls = tls
        self._timeout_s = control_timeout_s
        self._entries: dict[PeerAddress, _Entry] = {}
        # All handshakes with one incarnation use one link, which counts its peers before it is
        # connected: otherwise an old peer that ends could close the link that a newer one has just
        # connected. The lock is held while a link ends, so that none begins meanwhile.
        self._linking = asyncio.Lock()
        self._links: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(CONNECTING, "kv-connect")
        self._drops: set[asyncio.Task[None]] = set()

    async def acquire(self, host: str, port: int, engine_id: str) -> Peer:
        """The peer at (host, port), which must be incarnation `engine_id`; pair with `release`.

        Raises KVTransferParamsError when another incarnation answers, TransportError when the two
        nodes do not fit, UnavailableError or DeadlineExceededError when nobody answers.
        """
        with self._entry(host, port) as entry:
            async with entry.lock:
                # Under the entry's lock: another task may have met the peer meanwhile.
                known = self.at_hand(host, port, engine_id)
                return known or await self._meet(entry, host, port, engine_id=engine_id)

    def has_met(self, address: PeerAddress) -> bool:
        """True if a peer has answered there and is remembered."""
        entry = self._entries.get(address)
        return entry is not None and entry.peer is not None

    def at_hand(self, host: str, port: int, engine_id: str) -> Peer | None:
        """The peer if it is known already, without waiting; pair with `release`."""
        entry = self._entries.get((host, port))
        peer = None if entry is None else entry.peer
        if peer is None or peer.engine_id != engine_id or peer.is_gone:
            return None
        peer.users += 1
        return peer

    def hold(self, peer: Peer) -> bool:
        """One more use of `peer`, to be paired with `release`; False when it was dropped."""
        peer.users += not peer.is_dropped
        return not peer.is_dropped

    def release(self, peer: Peer) -> None:
        peer.users -= 1
        self._drop_unused(peer)

    def forget(self, peer: Peer) -> None:
        """The peer did not answer: the next use shakes hands again."""
        peer.is_gone = True
        self._drop_unused(peer)

    def known(self) -> list[Peer]:
        """Every peer that the next claim may use without a handshake."""
        peers = [entry.peer for entry in self._entries.values()]
        return [peer for peer in peers if peer is not None and not peer.is_gone]

    def control_of(self, host: str, port: int) -> ControlClient:
        """A client of what serves there, without a handshake; the caller closes it."""
        return ControlClient(
            join_host_port(host, port),
            token=self._token,
            caller_engine_id=self._identity().engine_id,
            timeout_s=self._timeout_s,
            tls=self._tls,
        )

    async def close(self) -> None:
        """Drops every peer; call after all have been released."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            if entry.peer is not None and not entry.peer.is_dropped:
                await self._drop(entry.peer)
        await asyncio.gather(*self._drops)
        self._threads.shutdown()

    @contextmanager
    def _entry(self, host: str, port: int) -> Iterator[_Entry]:
        """The entry of an address; afterwards the oldest idle ones over MAX_ADDRESSES go."""
        entry = self._entries.setdefault((host, port), _Entry())
        entry.num_asking += 1
        try:
            yield entry
        finally:
            entry.num_asking -= 1
            idle = [address for address, it in self._entries.items() if it.is_idle]
            for address in idle[: max(len(idle) - MAX_ADDRESSES, 0)]:
                del self._entries[address]

    async def _meet(self, entry: _Entry, host: str, port: int, *, engine_id: str) -> Peer:
        started = time.monotonic()
        if started < entry.silent_until:
            raise UnavailableError(f"{host}:{port} did not answer in time a moment ago")
        try:
            peer = await self._handshake(host, port, engine_id)
        except DeadlineExceededError:
            ended = time.monotonic()
            if ended - started > self._timeout_s / 2:  # else the peer has told of its own deadline
                entry.silent_until = ended + SILENCE_S
            raise
        old, entry.peer = entry.peer, peer
        if old is not None:
            self.forget(old)
        return peer

    async def _handshake(self, host: str, port: int, engine_id: str) -> Peer:
        control = self.control_of(host, port)
        try:
            reply = await control.handshake()
            if reply.engine_id != engine_id:
                raise KVTransferParamsError(
                    f"{host}:{port} is {reply.engine_id}, not {engine_id}; that node is gone",
                    code="foreign_kv_transfer_params",
                )
            check_geometry(self._identity(), reply)
            groups, lease_s = groups_of(reply), reply.lease_s
            if not math.isfinite(lease_s) or lease_s <= 0:
                raise TransportError(f"a peer's leases last {lease_s} s; it must be a time above 0")
            # Leases shorter than this are only believed of peers that are set up as this node is.
            least = min(LEASE_S[0], self._identity().lease_s)
            lease_s = min(max(lease_s, least), LEASE_S[1])
            link = f"{engine_id} at {control.address}"
            await self._link(link, control, host, reply=reply)
        except BaseException:
            await control.close()
            raise
        log.info("connected to peer", peer=engine_id, host=host, port=port)
        return Peer(engine_id, link, control, groups, lease_s)

    async def _link(
        self, link: str, control: ControlClient, host: str, *, reply: Handshake
    ) -> None:
        """Connects a link, and counts it; asks for other ways while those known lead nowhere."""
        async with self._linking:
            self._links[link] += 1
        try:
            ways_left = partial(self._ways_left, link, host)
            left = await self._in_thread(partial(ways_left, reply, before=None))
            while left:
                again = await control.handshake(left)
                if again.engine_id != reply.engine_id:
                    raise UnavailableError(f"{control.address} restarted while it was met")
                left = await self._in_thread(partial(ways_left, again, before=left))
        except BaseException:
            await self._unlink(link)
            raise

    def _ways_left(
        self, link: str, host: str, reply: Handshake, *, before: Sequence[str] | None
    ) -> Sequence[str]:
        """Connects; the transports that are still to be asked for, none once it is connected.

        They become fewer with each reply, whatever the peer says; else raises OutOfReachError.
        """
        try:
            address = address_for(self._transport.name, reply.transport, reply.transport_address)
            self._check_host(host, address, reply.engine_id)
            self._transport.connect(link, address)
        except OutOfReachError as error:
            if not error.left or (before is not None and len(error.left) >= len(before)):
                raise
            return error.left
        return ()

    async def _unlink(self, link: str) -> None:
        """The last peer of a link, in whatever order they end, closes it."""
        async with self._linking:
            self._links[link] -= 1
            if not self._links[link]:
                del self._links[link]
                await self._in_thread(partial(self._transport.disconnect, link))

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _check_host(self, host: str, address: bytes, engine_id: str) -> None:
        """Raises TransportError unless its memory is on `host`: a peer could name any host."""
        named = self._transport.listens_at(address)
        if named is None:
            return
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise TransportError(f"no address of {host!r} is known: {error}") from error
        if named not in {str(ipaddress.ip_address(address[0])) for *_, address in found}:
            raise TransportError(
                f"{engine_id} answers at {host} and says that its memory is at {named}; "
                "let it advertise the address that its transport listens on"
            )

    def _drop_unused(self, peer: Peer) -> None:
        if peer.is_gone and not peer.users and not peer.is_dropped:
            peer.is_dropped = True
            task = asyncio.get_running_loop().create_task(self._drop(peer))
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    async def _drop(self, peer: Peer) -> None:
        await self._unlink(peer.link)
        await peer.control.close()
