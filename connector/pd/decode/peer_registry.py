"""The prefill nodes that this node talks to: one handshake and one mapping per incarnation.

Called from pull and control threads; the event loop asks only for what is `at_hand`.
"""

import ipaddress
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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

SILENCE_S = 5.0
"""An address that let a handshake run out of time is not asked again for so long."""
MAX_ADDRESSES = 256
"""Addresses that are remembered although nothing there is in use."""
LEASE_S = (1.0, 86_400.0)
"""Bounds of a peer's lease time: renewals are neither too many nor too rare."""


@dataclass(slots=True)
class Peer:
    """One incarnation of a prefill node. `users` counts the threads that may touch its mapping.

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

    `num_asking`: threads that want it. `silent_until`: a monotonic time.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
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
        # Order of locks: an entry's, which a handshake holds for seconds, then this one, which
        # nobody holds while waiting for a peer.
        self._lock = threading.Lock()
        self._entries: dict[PeerAddress, _Entry] = {}
        # All handshakes with one incarnation use one link, which counts its peers before it is
        # connected: otherwise an old peer that ends could close the link that a newer one has just
        # connected. This lock comes after an entry's and never with `_lock`; a transport takes its
        # own under it. Nobody waits for a peer under it: to connect may mean to try.
        self._linking = threading.Lock()
        self._links: Counter[str] = Counter()

    def acquire(self, host: str, port: int, engine_id: str) -> Peer:
        """The peer at (host, port), which must be incarnation `engine_id`; pair with `release`.

        Raises KVTransferParamsError when another incarnation answers, TransportError when the two
        nodes do not fit, UnavailableError or DeadlineExceededError when nobody answers.
        """
        with self._entry(host, port) as entry, entry.lock:
            # Again under the entry's lock: another thread may have met the peer meanwhile.
            current = self.at_hand(host, port, engine_id)
            if current is None:
                current = self._meet(entry, host, port, engine_id=engine_id)
                self._replace(entry, current)
            return current

    def has_met(self, address: PeerAddress) -> bool:
        """True if a peer has answered there and is remembered."""
        with self._lock:
            entry = self._entries.get(address)
            return entry is not None and entry.peer is not None

    def at_hand(self, host: str, port: int, engine_id: str) -> Peer | None:
        """The peer if it is known already, without waiting; pair with `release`."""
        with self._lock:
            entry = self._entries.get((host, port))
            peer = None if entry is None else entry.peer
            if peer is None or peer.engine_id != engine_id or peer.is_gone:
                return None
            peer.users += 1
            return peer

    def hold(self, peer: Peer) -> bool:
        """One more use of `peer`, to be paired with `release`; False when it was dropped."""
        with self._lock:
            peer.users += not peer.is_dropped
            return not peer.is_dropped

    def release(self, peer: Peer) -> None:
        """Ends one use of `peer`."""
        with self._lock:
            peer.users -= 1
        self._drop_unused(peer)

    def forget(self, peer: Peer) -> None:
        """The peer did not answer: the next use shakes hands again."""
        with self._lock:
            peer.is_gone = True
        self._drop_unused(peer)

    def known(self) -> list[Peer]:
        """Every peer that the next claim may use without a handshake."""
        with self._lock:
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

    def close(self) -> None:
        """Drops every peer; call after all threads have released theirs."""
        with self._lock:
            entries, self._entries = self._entries, {}
        for entry in entries.values():
            if entry.peer is not None and not entry.peer.is_dropped:
                self._drop(entry.peer)

    @contextmanager
    def _entry(self, host: str, port: int) -> Iterator[_Entry]:
        """The entry of an address; afterwards the oldest idle ones over MAX_ADDRESSES go."""
        with self._lock:
            entry = self._entries.setdefault((host, port), _Entry())
            entry.num_asking += 1
        try:
            yield entry
        finally:
            with self._lock:
                entry.num_asking -= 1
                idle = [address for address, it in self._entries.items() if it.is_idle]
                for address in idle[: max(len(idle) - MAX_ADDRESSES, 0)]:
                    del self._entries[address]

    def _meet(self, entry: _Entry, host: str, port: int, *, engine_id: str) -> Peer:
        started = time.monotonic()
        if started < entry.silent_until:
            raise UnavailableError(f"{host}:{port} did not answer in time a moment ago")
        try:
            return self._handshake(host, port, engine_id)
        except DeadlineExceededError:
            ended = time.monotonic()
            if ended - started > self._timeout_s / 2:  # else the peer has told of its own deadline
                entry.silent_until = ended + SILENCE_S
            raise

    def _replace(self, entry: _Entry, peer: Peer) -> None:
        with self._lock:
            old, entry.peer = entry.peer, peer
        if old is not None:
            self.forget(old)

    def _handshake(self, host: str, port: int, engine_id: str) -> Peer:
        control = self.control_of(host, port)
        try:
            reply = control.handshake()
            if reply.engine_id != engine_id:
                raise KVTransferParamsError(
                    f"{host}:{port} is {reply.engine_id}, not {engine_id}; that node is gone",
                    code="foreign_kv_transfer_params",
                )
            check_geometry(self._identity(), reply)
            groups, lease_s = groups_of(reply), self._bounded(reply.lease_s)
            link = f"{engine_id} at {control.address}"
            self._link(link, control, host, reply=reply)
        except BaseException:
            control.close()
            raise
        log.info("connected to peer", peer=engine_id, host=host, port=port)
        return Peer(engine_id, link, control, groups, lease_s)

    def _link(self, link: str, control: ControlClient, host: str, *, reply: Handshake) -> None:
        """Connects a link, and counts it; asks for other ways while those known lead nowhere."""
        with self._linking:
            self._links[link] += 1
        try:
            left = self._ways_left(link, host, reply, before=None)
            while left:
                again = control.handshake(left)
                if again.engine_id != reply.engine_id:
                    raise UnavailableError(f"{control.address} restarted while it was met")
                left = self._ways_left(link, host, again, before=left)
        except BaseException:
            self._unlink(link)
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

    def _unlink(self, link: str) -> None:
        with self._linking:
            self._links[link] -= 1
            if not self._links[link]:
                del self._links[link]
                self._transport.disconnect(link)

    def _check_host(self, host: str, address: bytes, engine_id: str) -> None:
        """Raises TransportError unless its memory is on `host`: a peer could name any host."""
        named = self._transport.listens_at(address)
        if named is not None and named not in _addresses_of(host):
            raise TransportError(
                f"{engine_id} answers at {host} and says that its memory is at {named}; "
                "let it advertise the address that its transport listens on"
            )

    def _bounded(self, lease_s: float) -> float:
        """Leases shorter than this are only believed of peers that are set up as this node is."""
        least, most = LEASE_S
        if not math.isfinite(lease_s) or lease_s <= 0:
            raise TransportError(f"a peer's leases last {lease_s} s; it must be a time above 0")
        return min(max(lease_s, min(least, self._identity().lease_s)), most)

    def _drop_unused(self, peer: Peer) -> None:
        with self._lock:
            unused = peer.is_gone and not peer.users and not peer.is_dropped
            peer.is_dropped |= unused
        if unused:
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """The last peer of a link, in whatever order they end, closes it."""
        self._unlink(peer.link)
        peer.control.close()


def _addresses_of(host: str) -> set[str]:
    """As transports spell them. Raises TransportError for a name that nobody knows."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"no address of {host!r} is known: {error}") from error
    return {str(ipaddress.ip_address(address[0])) for *_, address in found}
