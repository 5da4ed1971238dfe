"""Reads over NIXL's UCX backend: RDMA and GPU memory where there is hardware, CMA or TCP elsewhere.

Speaks to NIXL's bindings, not to its `nixl_agent` class: that one fixes the progress thread's delay
at 0, so that an idle process spins on a whole core, and serialises descriptors with pickle.
UCX reads its own settings (`UCX_TLS`, `UCX_NET_DEVICES`) from the environment; none is needed.
"""

import importlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from connector.transports.base import (
    CompletedTransfer,
    SpanPair,
    Transfer,
    TransferStatus,
    Transport,
    check_spans,
    decode_address,
)
from engine.arena import ArenaMemory
from engine.errors import ConfigError, TransferTimeoutError, TransportError

_Region = tuple[int, int, int]  # address, length in bytes, device index: NIXL's descriptor
_MemoryKind = Literal["DRAM", "VRAM"]

_PROGRESS_DELAY_US = 1000  # how long the progress thread sleeps when no event wakes it
_BUSY_POLL_S = 50e-6
_MIN_SLEEP_S = 20e-6
_MAX_SLEEP_S = 500e-6

# They share no base class but Exception.
_NIXL_ERRORS = (
    "nixlNotPostedError",
    "nixlInvalidParamError",
    "nixlBackendError",
    "nixlNotFoundError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlCancelledError",
    "nixlNoTelemetryError",
)


class NixlAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="nixl"):
    """A peer's agent and arena. Descriptors are built here from base + offset, never received."""

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)]
    base: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    memory: _MemoryKind
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)]


class NixlAgent:
    """NIXL's agent with one UCX backend, typed errors and plain arguments."""

    def __init__(self, name: str) -> None:
        self._nixl = _import_nixl()
        self._errors = (RuntimeError, *(getattr(self._nixl, error) for error in _NIXL_ERRORS))
        self.name = name
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = (
            True  # a peer that only serves must answer over TCP without being called
        )
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        with self._typed("open the UCX backend"):
            self._agent: Any = self._nixl.nixlAgent(name, config)
            # `peer`: UCX reports a peer that vanished instead of waiting for it for ever.
            backend = self._agent.createBackend("UCX", {"ucx_error_handling_mode": "peer"})
        self._backends = [backend]

    @contextmanager
    def _typed(self, action: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransportError(f"nixl could not {action}: {error}") from error

    def register(self, region: _Region, kind: _MemoryKind) -> Any:
        """Pin the region; the result is what `deregister` takes."""
        registered = self._nixl.nixlRegDList(self._segment(kind), [(*region, "")])
        with self._typed(f"register {region[1]} B of {kind}"):
            self._agent.registerMem(registered, self._backends)
        return registered

    def deregister(self, registered: Any) -> None:
        """Unpin."""
        with self._typed("deregister the arena"):
            self._agent.deregisterMem(registered, self._backends)

    def metadata(self) -> bytes:
        """What a peer's `load` needs; opaque bytes, not pickle."""
        with self._typed("describe itself"):
            return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes, name: str) -> None:
        """Make a remote agent known and start connecting. Refuses metadata of any other agent."""
        with self._typed(f"load the metadata of {name}"):
            loaded = self._agent.loadRemoteMD(metadata)
            loaded = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
            if loaded != name:
                self._agent.invalidateRemoteMD(loaded)
                raise TransportError(f"the address of {name} carries the metadata of {loaded}")

    def unload(self, name: str) -> None:
        """Forget a remote agent and close its connection at once, so no late byte can arrive."""
        with self._typed(f"disconnect {name}"):
            self._agent.invalidateRemoteMD(name)

    def prepare(
        self,
        name: str,
        local: Sequence[_Region],
        remote: Sequence[_Region],
        *,
        kinds: tuple[_MemoryKind, _MemoryKind],
    ) -> int:
        """A read request, not yet posted."""
        lists = [
            self._nixl.nixlXferDList(self._segment(kind), np.array(regions, dtype=np.uint64))
            for kind, regions in zip(kinds, (local, remote), strict=True)
        ]
        with self._typed(f"prepare a read from {name}"):
            read = self._nixl.NIXL_READ
            return int(self._agent.createXferReq(read, *lists, name, b"", self._backends))

    def post(self, request: int) -> bool:
        """Start; True when done already: on one host, UCX copies in this call, without the GIL."""
        with self._typed("start a read"):
            return bool(self._agent.postXferReq(request, b"") == self._nixl.NIXL_SUCCESS)

    def is_done(self, request: int) -> bool:
        """Progress the request."""
        with self._typed("finish a read"):
            return bool(self._agent.getXferStatus(request) == self._nixl.NIXL_SUCCESS)

    def release(self, request: int) -> None:
        """Free a request, cancelling it first when it is under way."""
        with self._typed("release a read"):
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Stop the progress thread and free the agent; the last call on this object."""
        self._agent = None

    def _segment(self, kind: _MemoryKind) -> Any:
        return self._nixl.VRAM_SEG if kind == "VRAM" else self._nixl.DRAM_SEG


@dataclass(slots=True)
class _Peer:
    blob: bytes
    address: NixlAddress
    loaded: bool = False


class NixlTransfer(Transfer):
    """One request. The lock keeps `close` in one thread from freeing what another thread polls."""

    __slots__ = ("_failure", "_lock", "_peer", "_request", "_status", "_transport")

    def __init__(self, transport: "NixlTransport", peer: _Peer, request: int) -> None:
        self._transport = transport
        self._peer = peer
        self._request = request
        self._status = TransferStatus.PENDING
        self._failure: str | None = None
        self._lock = Lock()

    def post(self) -> None:
        """Start it. Raises TransportError, with everything released."""
        with self._lock:
            self._step(self._transport.agent.post)

    def poll(self) -> TransferStatus:
        with self._lock:
            if self._failure is not None:
                raise TransportError(self._failure)
            if self._status is TransferStatus.PENDING:
                self._step(self._transport.agent.is_done)
            return self._status

    def wait(self, timeout_s: float) -> None:
        started = time.monotonic()
        pause = _MIN_SLEEP_S
        while self.poll() is TransferStatus.PENDING:
            waited = time.monotonic() - started
            if waited >= timeout_s:
                self.cancel()
                raise TransferTimeoutError(
                    f"read from {self._peer.address.agent} was not done after {timeout_s} s"
                )
            if waited > _BUSY_POLL_S:
                time.sleep(pause)
                pause = min(2 * pause, _MAX_SLEEP_S)

    def cancel(self) -> None:
        with self._lock:
            if self._status is TransferStatus.PENDING and self._failure is None:
                self._fail(f"read from {self._peer.address.agent} was cancelled")

    def _step(self, progress: Callable[[int], bool]) -> None:
        try:
            done = progress(self._request)
        except TransportError as error:
            self._fail(str(error))
            raise
        if done:
            self._status = TransferStatus.DONE
            self._transport.release(self, self._request)

    def _fail(self, message: str) -> None:
        """UCX cannot recall a read under way; closing its connection keeps late bytes out."""
        self._failure = message
        with ExitStack() as stack:
            stack.callback(self._transport.unload, self._peer)
            stack.callback(self._transport.release, self, self._request)


class NixlTransport(Transport):
    """Host or CUDA arenas, one host or many. Raises ConfigError when nixl is not installed."""

    name = "nixl"

    def __init__(self, agent_name: str) -> None:
        # Each life gets its own agent name: NIXL refuses new metadata under a name that it knows.
        self.agent = NixlAgent(f"{agent_name}-{secrets.token_hex(8)}")
        self._arena: ArenaMemory | None = None
        self._registered: Any = None
        self._peers: dict[str, _Peer] = {}
        self._live: set[NixlTransfer] = set()
        self._lock = Lock()

    def register(self, arena: ArenaMemory) -> bytes:
        if self._arena is not None:
            raise TransportError(
                "this transport has an arena already; open one transport per arena"
            )
        (region,) = _regions(arena.data_ptr, arena.device_index or 0, [(0, arena.nbytes)])
        self._registered = self.agent.register(region, _kind(arena))
        self._arena = arena
        address = NixlAddress(
            agent=self.agent.name,
            metadata=self.agent.metadata(),
            base=arena.data_ptr,
            nbytes=arena.nbytes,
            memory=_kind(arena),
            device=arena.device_index or 0,
        )
        return msgspec.msgpack.encode(address)

    def connect(self, peer: str, address: bytes) -> None:
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.blob != address:
                entry = _Peer(address, decode_address(address, NixlAddress))
                self._check_name(peer, entry.address.agent)
                self._unload(self._peers.pop(peer, None))
                self._load(entry)
                self._peers[peer] = entry

    def read(self, peer: str, spans: Sequence[SpanPair]) -> Transfer:
        entry, arena = self._peers.get(peer), self._arena
        if entry is None:
            raise TransportError(f"peer {peer!r} is not connected")
        if arena is None:
            raise TransportError("register an arena before reading")
        check_spans(spans, remote_nbytes=entry.address.nbytes, local_nbytes=arena.nbytes)
        if not spans:
            return CompletedTransfer()
        with self._lock:
            self._load(entry)
            transfer = NixlTransfer(self, entry, self._prepare(entry, arena, spans))
            self._live.add(transfer)
        transfer.post()
        return transfer

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._unload(self._peers.pop(peer, None))

    def close(self) -> None:
        for transfer in tuple(self._live):
            transfer.cancel()
        with ExitStack() as stack:  # runs bottom up, every step even if one fails
            stack.callback(self.agent.close)
            stack.callback(self._deregister)
            for peer in tuple(self._peers):
                stack.callback(self.disconnect, peer)

    def unload(self, peer: _Peer) -> None:
        """Close the peer's connection; its next read opens a new one."""
        with self._lock:
            self._unload(peer)

    def release(self, transfer: NixlTransfer, request: int) -> None:
        """Free the request of a transfer that has ended."""
        with self._lock:
            self._live.discard(transfer)
        self.agent.release(request)

    def _check_name(self, peer: str, agent: str) -> None:
        owners = [name for name, entry in self._peers.items() if entry.address.agent == agent]
        if owners and owners != [peer]:
            raise TransportError(f"{peer!r} announces the agent {agent} of {owners[0]!r}")

    def _load(self, peer: _Peer) -> None:
        if not peer.loaded:
            self.agent.load(peer.address.metadata, peer.address.agent)
            peer.loaded = True

    def _unload(self, peer: _Peer | None) -> None:
        if peer is not None and peer.loaded:
            peer.loaded = False
            self.agent.unload(peer.address.agent)

    def _prepare(self, peer: _Peer, arena: ArenaMemory, spans: Sequence[SpanPair]) -> int:
        address = peer.address
        local = [(span.local, span.length) for span in spans]
        remote = [(span.remote, span.length) for span in spans]
        try:
            return self.agent.prepare(
                address.agent,
                _regions(arena.data_ptr, arena.device_index or 0, local),
                _regions(address.base, address.device, remote),
                kinds=(_kind(arena), address.memory),
            )
        except TransportError:
            peer.loaded = False  # NIXL may have dropped it; the next read loads it again
            raise

    def _deregister(self) -> None:
        registered, self._registered, self._arena = self._registered, None, None
        if registered is not None:
            self.agent.deregister(registered)


def _import_nixl() -> ModuleType:
    """Heavy and optional, so not imported at the top of the file."""
    try:
        return importlib.import_module("nixl")
    except ImportError as error:
        raise ConfigError(
            f"the nixl transport needs the nixl package ({error}): pip install tandem[nixl]"
        ) from error


def _kind(arena: ArenaMemory) -> _MemoryKind:
    return "DRAM" if arena.device_index is None else "VRAM"


def _regions(base: int, device: int, ranges: Sequence[tuple[int, int]]) -> list[_Region]:
    return [(base + offset, length, device) for offset, length in ranges]
