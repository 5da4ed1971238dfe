"""The base of the five transports: regions, peers by name, and one order of locks.

    transport._lock  >  lock of a connection or of a read  >  lock of a list of idle connections

Threads take these locks from left to right and never the other way round. A hook below runs under
the transport's lock unless it says otherwise. No thread waits for bytes while it holds that lock:
`Transfer.wait` and the draining `Transfer.cancel` take only the locks to its right.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import RLock
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from connector.transports.base import HAS_ARENA, SpanPair, Transfer, Transport, check_spans
from engine.arena import ArenaMemory
from engine.errors import TransportError


@dataclass(slots=True)
class RemoteMemory:
    """One connected peer: its name here, its encoded address, and the bytes of each region."""

    name: str
    blob: bytes
    nbytes: tuple[int, ...]


class Server(Protocol):
    """Lets peers read regions until `close`; `address` is encoded. Raises TransportError."""

    @property
    def address(self) -> bytes: ...

    def close(self) -> None: ...


_Remote = TypeVar("_Remote", bound=RemoteMemory)


class ArenaTransport(Transport, Generic[_Remote]):
    """Base of all transports that move bytes; subclasses say how in the hooks below.

    `agent_name` is this node's name for its peers, `host` the address of this machine that they
    use; only its interface listens.
    """

    moves_devices = False
    moves_hosts = True
    package: str | None = None
    """Imported by it, and installed by the extra of the transport's name; None: always there."""

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        self.agent_name = agent_name
        self._host = host
        self._lock = RLock()  # `connect` calls `disconnect` under it
        self._regions: tuple[ArenaMemory, ...] = ()
        self._server: Server | None = None
        self._peers: dict[str, _Remote] = {}
        self._reads: WeakSet[Transfer] = WeakSet()

    @classmethod
    def host_named_in(cls, address: bytes) -> str | None:
        """`listens_at`, for a transport that may not be open."""
        return None

    def listens_at(self, address: bytes) -> str | None:
        return self.host_named_in(address)

    def register(self, *regions: ArenaMemory) -> None:
        if self._regions:
            raise TransportError(HAS_ARENA)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._regions = regions
            self._server = self._serve()
            undo.pop_all()

    @property
    def address(self) -> bytes:
        if self._server is None:
            raise TransportError("no arena is registered")
        return self._server.address

    def connect(self, peer: str, address: bytes) -> None:
        if not self._regions:
            raise TransportError("register an arena before connecting to peers")
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known.blob == address:
                return
            # What cannot be decoded costs the peer nothing: its old connection stays. The old one
            # goes before the new one opens, as both may go by the same name in a library.
            remote = self._decode(peer, address)
            self.disconnect(peer)
            self._open(remote)
            self._peers[peer] = remote

    def read(self, peer: str, spans: Sequence[SpanPair], region: int = 0) -> Transfer:
        with self._lock:
            remote = self._peers.get(peer)
            if remote is None:
                raise TransportError(f"peer {peer!r} is not connected")
            if region >= min(len(self._regions), len(remote.nbytes)):
                raise TransportError(f"peer {peer!r} and this node do not both have {region=}")
            sizes = remote.nbytes[region], self._regions[region].nbytes
            check_spans(spans, remote_nbytes=sizes[0], local_nbytes=sizes[1])
            transfer = self._start(remote, spans, region)
            self._reads.add(transfer)
            return transfer

    def disconnect(self, peer: str) -> None:
        with self._lock:
            remote = self._peers.pop(peer, None)
        if remote is not None:
            self._drop(remote, f"{peer!r} was disconnected")

    def close(self) -> None:
        # Reads end first, so that peers owe nothing to a reader that has left: over TCP, UCX aborts
        # the process that does.
        with self._lock:
            reads = tuple(self._reads)
        for transfer in reads:  # without the lock: they may drain
            transfer.cancel()
        with self._lock, ExitStack() as stack:  # runs bottom up, every step even if one fails
            if self._server is not None:
                stack.callback(self._server.close)
            stack.callback(self._stop_reading)
            while self._peers:
                _, remote = self._peers.popitem()
                stack.callback(self._drop, remote, "the transport was closed")
            self._regions, self._server = (), None

    @abstractmethod
    def _serve(self) -> Server:
        """Let peers read `_regions`; without the lock."""

    @abstractmethod
    def _decode(self, peer: str, blob: bytes) -> _Remote:
        """Check an untrusted address. Raises TransportError."""

    def _open(self, remote: _Remote) -> None:
        """Connect to a peer or map its memory, where the first read is not to pay for it."""

    @abstractmethod
    def _start(self, remote: _Remote, spans: Sequence[SpanPair], region: int) -> Transfer:
        """Begin to read spans that have been checked."""

    def _drop(self, remote: _Remote, reason: str) -> None:
        """Fail the reads from a peer and disconnect it; with or without the lock."""

    def _stop_reading(self) -> None:
        """Give back what the reads of all peers share. Idempotent."""
