"""Several transports as one: each peer is read by the first that has been seen to reach its memory.

Neither addresses nor user ids tell whether memory can be shared (containers, pid namespaces, other
users), so every way is tried once when a peer is met: a nonce that the owner has told must be found
in its memory. Whoever can tell it can have it read elsewhere too, so this proves a way and not a
peer; that bytes belong to a prompt is for the lease's record to say.
"""

import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
import structlog

from connector.transports.address import AUTO, decode_address
from connector.transports.arena_transport import ArenaTransport
from connector.transports.base import HAS_ARENA, SpanPair, Transfer, Transport
from connector.transports.cuda_ipc import CudaIpcAddress, CudaIpcTransport
from connector.transports.shm import ShmAddress, ShmTransport
from engine.arena import ArenaMemory
from engine.errors import ConfigError, OutOfReachError, TransportError

log = structlog.get_logger()

PROBE_S = 5.0
"""For the nonce to arrive by one way."""
NONCE_BYTES: Final = 32
NUM_PROBES: Final = 127
"""Peers that may be met at once; a node has fewer threads that pull."""
MAX_WAYS: Final = 8
NEAR: Final[Mapping[str, type[ShmAddress | CudaIpcAddress]]] = MappingProxyType(
    {ShmTransport.name: ShmAddress, CudaIpcTransport.name: CudaIpcAddress}
)
"""Transports that reach memory of one host only, and how they name it."""

_Name = Annotated[str, msgspec.Meta(max_length=20)]
_Names = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_WAYS)]
_Ways = Annotated[dict[_Name, bytes], msgspec.Meta(min_length=1, max_length=MAX_WAYS)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class AutoAddress(msgspec.Struct, frozen=True, tag_field="transport", tag=AUTO):
    """`ways`: addresses of the same memory, by transport. `offered` could be opened too.

    `nonce` is None for a node whose one transport was named, and whose memory holds none.
    """

    offered: _Names
    ways: _Ways
    nonce: _Nonce | None


class AutoTransport(Transport):
    """Owner of the transports of `kinds`, the best first; `at_start` of them serve from the start.

    Others are opened when they are needed: by `offer` to serve, by `connect` to read. One that
    cannot be opened is left out for good. A region of its own comes after those of `register`:

        | nonce of this incarnation | 127 places where nonces of peers arrive |
    """

    name = AUTO

    def __init__(
        self,
        agent_name: str,
        host: str,
        kinds: Mapping[str, type[ArenaTransport[Any]]],
        *,
        at_start: int,
    ) -> None:
        self._agent_name = agent_name
        self._host = host
        self._kinds = dict(kinds)
        self._at_start = at_start
        # `_opening` is held for the second that a process may take to start, so that no transport
        # is opened twice; then comes `_lock`, for a look only: reads go on meanwhile.
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._opened: dict[str, Transport] = {}
        self._by_peer: dict[str, tuple[Transport, bytes]] = {}
        self._regions: tuple[ArenaMemory, ...] = ()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._places = deque(NONCE_BYTES * place for place in range(1, NUM_PROBES + 1))

    def register(self, *regions: ArenaMemory) -> None:
        if self._regions:
            raise TransportError(HAS_ARENA)
        # In host memory, wherever the arena is.
        probe = ArenaMemory(NONCE_BYTES * (1 + NUM_PROBES))
        probe.host_bytes()[:NONCE_BYTES] = self._nonce
        with ExitStack() as undo:
            undo.callback(self.close)
            self._regions = (*regions, probe)
            while len(self._opened) < self._at_start and self._open_one_of(self._names()):
                pass
            if not self._opened:
                raise TransportError("none of the transports could be opened; the log says why")
            undo.pop_all()

    @property
    def address(self) -> bytes:
        with self._lock:
            opened, offered = dict(self._opened), tuple(self._kinds)
        if not opened:
            raise TransportError("there is no arena yet")
        ways = {name: transport.address for name, transport in opened.items()}
        return msgspec.msgpack.encode(AutoAddress(offered=offered, ways=ways, nonce=self._nonce))

    def offer(self, wanted: Sequence[str]) -> None:
        """Serves by one more transport that a peer can use; does nothing if none of these opens."""
        with self._lock:
            has_one = any(name in self._opened for name in wanted)
        if not has_one:
            self._open_one_of(wanted)

    def listens_at(self, address: bytes) -> str | None:
        ways = decode_address(address, AutoAddress).ways
        with self._lock:
            kinds = [(self._kinds[name], way) for name, way in ways.items() if name in self._kinds]
        named = {kind.host_named_in(way) for kind, way in kinds} - {None}
        if len(named) > 1:
            raise TransportError(f"the peer says that its memory is at {sorted(map(str, named))}")
        return named.pop() if named else None

    def connect(self, peer: str, address: bytes) -> None:
        told = decode_address(address, AutoAddress)
        with self._lock:
            before = self._by_peer.get(peer)
        if before is not None and before[1] == address:
            return
        failed: dict[str, str] = {}
        for name in self._names():
            reason = self._why_not(name, peer, told)
            if reason is None:
                break
            failed[name] = reason
        else:
            left = [it for it in self._names() if it in told.offered and it not in told.ways]
            tried = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise OutOfReachError(f"no transport reaches the peer ({tried})", left)
        log.info("a peer is read", peer=peer, transport=name, reason="; ".join(failed.values()))
        with self._lock:
            chosen = self._opened[name]
            self._by_peer[peer] = chosen, address
        if before is not None and before[0] is not chosen:
            before[0].disconnect(peer)

    def read(self, peer: str, spans: Sequence[SpanPair], region: int = 0) -> Transfer:
        with self._lock:
            known = self._by_peer.get(peer)
        if known is None:
            raise TransportError(f"peer {peer!r} is not connected")
        if region >= len(self._regions) - 1:
            raise TransportError(f"peer {peer!r} and this node do not both have {region=}")
        return known[0].read(peer, spans, region)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            known = self._by_peer.pop(peer, None)
        if known is not None:
            known[0].disconnect(peer)

    def close(self) -> None:
        with self._opening, self._lock, ExitStack() as stack:  # every step even if one fails
            for region in self._regions[-1:]:
                stack.callback(region.close)
            for transport in self._opened.values():
                stack.callback(transport.close)
            self._by_peer.clear()
            self._opened, self._kinds, self._regions = {}, {}, ()

    def _names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._kinds)

    def _open_one_of(self, names: Sequence[str]) -> bool:
        """Opens the best of these that is not open; false when there is none."""
        for name in self._names():
            with self._lock:
                is_open = name in self._opened
            if name in names and not is_open and self._open(name) is not None:
                return True
        return False

    def _open(self, name: str) -> Transport | None:
        """The transport, opened now if it was not; None where that fails, now and later."""
        with self._opening:
            with self._lock:
                kind, transport = self._kinds.get(name), self._opened.get(name)
            if transport is not None or kind is None:
                return transport
            try:
                transport = kind(self._agent_name, self._host)
                transport.register(*self._regions)
            except (TransportError, ConfigError) as error:
                log.warning("transport_not_available", transport=name, error=str(error))
                with self._lock:
                    del self._kinds[name]
                return None
            with self._lock:
                self._opened[name] = transport
            return transport

    def _why_not(self, name: str, peer: str, told: AutoAddress) -> str | None:
        """Connects by one transport. The reason why this way does not lead there; None: it does."""
        if name not in told.ways:
            return "the peer does not serve by it"
        if (transport := self._open(name)) is None:
            return "it cannot be opened here"
        try:
            transport.connect(peer, told.ways[name])
            if told.nonce is not None:
                self._probe(transport, peer, told.nonce)
        except TransportError as error:
            transport.disconnect(peer)
            return str(error)
        return None

    def _probe(self, transport: Transport, peer: str, nonce: bytes) -> None:
        """Raises TransportError unless the nonce is found in the peer's memory in time."""
        probe = self._regions[-1]
        place = self._places.popleft()
        try:
            found = probe.host_bytes()[place : place + NONCE_BYTES]
            found[:] = bytes(NONCE_BYTES)
            span = SpanPair(0, place, NONCE_BYTES)
            transport.read(peer, [span], len(self._regions) - 1).wait(PROBE_S)
            if not secrets.compare_digest(bytes(found), nonce):
                raise TransportError("what is read there is not what the peer has told of itself")
        finally:
            self._places.append(place)


def host_behind(name: str, address: bytes) -> str | None:
    """The host of a node with transport `name` and this address; None: the address does not tell.

    `why_out_of_reach` compares two of them. Raises TransportError for anything but an address.
    """
    ways = decode_address(address, AutoAddress).ways if name == AUTO else {name: address}
    for near, kind in NEAR.items():
        if near in ways:
            return decode_address(ways[near], kind).host
    return None


def address_for(reader: str, owner: str, address: bytes) -> bytes:
    """Address at which transport `reader` reaches one with transport `owner`.

    Raises OutOfReachError where the owner does not serve by it, or not yet, and TransportError for
    an address that is none.
    """
    if reader == owner:
        return address
    if reader == AUTO:
        named = AutoAddress(offered=(owner,), ways={owner: address}, nonce=None)
        return msgspec.msgpack.encode(named)
    told = decode_address(address, AutoAddress)
    if reader in told.ways:
        return told.ways[reader]
    left = (reader,) if reader in told.offered else ()
    raise OutOfReachError(f"the peer is read by one of {told.offered}, not by {reader}", left)


def offered_by(name: str, address: bytes) -> tuple[str, ...]:
    """The transports by which a node can be read, the best first. Raises as `host_behind` does."""
    return decode_address(address, AutoAddress).offered if name == AUTO else (name,)
