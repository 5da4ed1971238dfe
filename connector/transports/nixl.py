"""Reads over NIXL's UCX backend: RDMA and GPU memory where there is hardware, CMA or TCP elsewhere.

Knows peers, spans and what may go wrong between them; the bindings are `nixl_agent.py`'s business.
UCX reads its own settings (`UCX_TLS`) from the environment; none is needed.
"""

import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock

from connector.transports.base import (
    CompletedTransfer,
    SpanPair,
    Transfer,
    TransferStatus,
    Transport,
    check_spans,
    decode_address,
)
from connector.transports.nixl_agent import MemoryKind, NixlAddress, NixlAgent, Region, load_nixl
from connector.transports.nixl_server import AgentHere, NixlServer, OwnerProcess
from connector.transports.ucx_worker import network_devices
from engine.arena import ArenaMemory
from engine.errors import TransferTimeoutError, TransportError

_BUSY_POLL_S = 50e-6
_MIN_SLEEP_S = 20e-6
_MAX_SLEEP_S = 500e-6
_REQUEST_BYTES = 8 << 20
_DRAIN_S = 1.0  # how long a cancelled read may take to end by itself
_MAX_UNLOADED = 8  # connections that an agent may have closed before another takes its place


@dataclass(slots=True, frozen=True)
class _Peer:
    blob: bytes
    address: NixlAddress


class NixlTransfer(Transfer):
    """A read as requests, one after the other; runs under the transport's lock.

    A request is one span, because UCX 1.21 over TCP aborts the process that serves a queued read of
    a reader that has just died (`nixl_server` starts another). One at a time makes that rare; RDMA
    and same-host paths are free of it. Where UCX has copied all when a request is posted, on the
    same host, nothing is ever queued: there the next request is several spans.
    """

    __slots__ = (
        "_reader", "_total", "arriving", "copies_at_once", "failure", "here", "peer", "request",
        "status", "waiting",
    )  # fmt: skip

    def __init__(self, reader: "_Reader", peer: NixlAddress, spans: Sequence[SpanPair]) -> None:
        self._reader = reader
        self._total = sum(span.length for span in spans)
        self.peer = peer
        self.waiting = deque(spans)
        self.arriving = self.here = 0  # bytes of the request under way, and of those that ended
        self.copies_at_once = False
        self.request: int | None = None
        self.status = TransferStatus.PENDING
        self.failure: str | None = None

    def poll(self) -> TransferStatus:
        self._has(self._total)
        return self.status

    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        wanted = self._total if nbytes is None else nbytes
        if not self._wait_until(time.monotonic() + timeout_s, wanted):
            self.cancel()
            raise TransferTimeoutError(f"read from {self.peer.agent} not done after {timeout_s} s")

    def cancel(self) -> None:
        with self._reader.lock:
            if self.status is TransferStatus.DONE or self.failure is not None:
                return
            self.waiting.clear()
        with suppress(TransportError):  # it may fail while it drains: cancelled is cancelled
            self._wait_until(time.monotonic() + _DRAIN_S, self.here + self.arriving)
        with self._reader.lock:
            if self.status is TransferStatus.PENDING and self.failure is None:
                self._reader.close(f"a read from {self.peer.agent} was cancelled")
            self.failure = f"the read from {self.peer.agent} was cancelled"

    def next_spans(self, wanted: int) -> list[SpanPair]:
        """The next request; `wanted` bytes should be here then, if it may have several spans."""
        spans = [self._next_span(_REQUEST_BYTES)]
        most = min(wanted - self.here, _REQUEST_BYTES) if self.copies_at_once else 0
        while self.waiting and self.arriving < most:
            spans.append(self._next_span(most - self.arriving))
        return spans

    def _next_span(self, most: int) -> SpanPair:
        """At most so many bytes of it; the rest stays."""
        remote, local, length = self.waiting.popleft()
        if length > most:
            self.waiting.appendleft(SpanPair(remote + most, local + most, length - most))
        self.arriving += min(length, most)
        return SpanPair(remote, local, min(length, most))

    def _has(self, wanted: int) -> bool:
        """Whether so many bytes are here; posts what must come before."""
        with self._reader.lock:
            if self.failure is not None:
                raise TransportError(self.failure)
            if self.status is TransferStatus.PENDING:
                self._reader.advance(self, wanted)
            return self.here >= wanted

    def _wait_until(self, deadline: float, wanted: int) -> bool:
        """Busy for a moment, then with growing pauses: other threads need the core and the GIL."""
        busy_until = time.monotonic() + _BUSY_POLL_S
        pause = _MIN_SLEEP_S
        while not self._has(wanted):
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= busy_until:
                time.sleep(pause)
                pause = min(2 * pause, _MAX_SLEEP_S)
        return True


class _Reader:
    """The agent that reads. Apart from the one that serves, because it must be able to die.

    NIXL has no abort: releasing a read that is under way frees its handle, and its bytes still
    arrive (ai-dynamo/nixl#2044). So a cancelled read first drains. If the peer does not answer,
    only closing the whole agent keeps its bytes out of the arena; the next read opens a new one,
    and peers that read from us notice nothing. Closing it also gives sockets back: those of a
    connection to a peer that lives stay open on both sides otherwise (ai-dynamo/nixl#2025).
    """

    def __init__(self, name: str, arena: ArenaMemory, lock: RLock, *, devices: str) -> None:
        self.lock = lock
        self.arena = arena
        self.closed = False
        self._agent = NixlAgent(name, progress_thread=False, devices=devices)
        self._registered = self._agent.register(_region(arena), _kind(arena))
        self._loaded: set[str] = set()
        self._num_unloaded = 0
        self._live: set[NixlTransfer] = set()

    @property
    def under_way(self) -> tuple[NixlTransfer, ...]:
        """Reads that have neither ended nor failed."""
        return tuple(self._live)

    def load(self, peer: NixlAddress) -> None:
        """Make the peer known to this reader, unless it is."""
        if peer.agent not in self._loaded:
            self._agent.load(peer.metadata, peer.agent)
            self._loaded.add(peer.agent)

    def unload(self, agent: str) -> None:
        """Close the connection to a peer; with a read from it under way, close the reader.

        Also after many connections, as soon as nothing is under way.
        """
        if any(transfer.peer.agent == agent for transfer in self._live):
            self.close(f"{agent} was disconnected")
        elif agent in self._loaded:
            self._loaded.discard(agent)
            self._agent.unload(agent)
            self._num_unloaded += 1
            if self._num_unloaded >= _MAX_UNLOADED and not self._live:
                self.close("its connections have been closed")

    def start(self, peer: NixlAddress, spans: Sequence[SpanPair]) -> NixlTransfer:
        """Post the first request. Raises TransportError with everything released."""
        self.load(peer)
        transfer = NixlTransfer(self, peer, spans)
        self._live.add(transfer)
        self.advance(transfer, 1)
        return transfer

    def advance(self, transfer: NixlTransfer, wanted: int) -> None:
        """Progress the request under way and post the next ones, until `wanted` bytes are here."""
        try:
            while self._is_idle(transfer) and transfer.waiting and transfer.here < wanted:
                self._post(transfer, transfer.next_spans(wanted))
            if transfer.request is None and not transfer.waiting:
                transfer.status = TransferStatus.DONE
                self._live.discard(transfer)
        except TransportError as error:
            self._fail(transfer, str(error))
            self.unload(transfer.peer.agent)  # its endpoint is dead; the next read makes a new one
            raise

    def close(self, reason: str) -> None:
        """Fail what is under way and free the agent. Idempotent."""
        if self.closed:
            return
        self.closed = True
        with ExitStack() as stack:  # runs bottom up, every step even if one fails
            stack.callback(self._agent.close)
            stack.callback(self._agent.deregister, self._registered)
            for agent in self._loaded:
                stack.callback(self._agent.unload, agent)
            for transfer in tuple(self._live):
                stack.callback(self._fail, transfer, reason)

    def _is_idle(self, transfer: NixlTransfer) -> bool:
        if transfer.request is not None and self._agent.is_done(transfer.request):
            self._arrived(transfer)
        return transfer.request is None

    def _post(self, transfer: NixlTransfer, spans: Sequence[SpanPair]) -> None:
        transfer.request = self._prepare(transfer.peer, spans)
        transfer.copies_at_once = self._agent.post(transfer.request)
        if transfer.copies_at_once:
            self._arrived(transfer)

    def _arrived(self, transfer: NixlTransfer) -> None:
        self._release(transfer)
        transfer.here += transfer.arriving
        transfer.arriving = 0

    def _fail(self, transfer: NixlTransfer, reason: str) -> None:
        transfer.failure = reason
        self._live.discard(transfer)
        self._release(transfer)

    def _release(self, transfer: NixlTransfer) -> None:
        request, transfer.request = transfer.request, None
        if request is not None:
            self._agent.release(request)

    def _prepare(self, peer: NixlAddress, spans: Sequence[SpanPair]) -> int:
        base, _, device = _region(self.arena)
        local = [(base + span.local, span.length, device) for span in spans]
        remote = [(peer.base + span.remote, span.length, peer.device) for span in spans]
        return self._agent.prepare(
            peer.agent, local, remote, kinds=(_kind(self.arena), peer.memory)
        )


class NixlTransport(Transport):
    """Host or CUDA arenas, one host or many. Raises ConfigError when nixl is not installed.

    `host`: the address of this machine that peers use; only its interface listens.
    """

    name = "nixl"

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        load_nixl()
        self._devices = network_devices(host).get("NET_DEVICES", "")
        self._agent_name = agent_name
        self._lock = RLock()
        self._server: NixlServer | None = None
        self._arena: ArenaMemory | None = None
        self._reader: _Reader | None = None
        self._peers: dict[str, _Peer] = {}

    def register(self, arena: ArenaMemory) -> None:
        if self._arena is not None:
            raise TransportError(
                "this transport has an arena already; open one transport per arena"
            )
        with ExitStack() as undo:
            undo.callback(self.close)
            self._arena = arena
            self._server = self._serve(arena)
            self._open_reader()  # a process's first one takes UCX 0.4 s, which no request waits for
            undo.pop_all()

    @property
    def address(self) -> bytes:
        if self._server is None:
            raise TransportError("no arena is registered")
        return self._server.address

    def connect(self, peer: str, address: bytes) -> None:
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known.blob == address:
                return
            entry = _Peer(address, decode_address(address, NixlAddress))
            self._check_name(peer, entry.address.agent)
            self.disconnect(peer)
            self._open_reader().load(entry.address)
            self._peers[peer] = entry

    def read(self, peer: str, spans: Sequence[SpanPair]) -> Transfer:
        with self._lock:
            if peer not in self._peers:
                raise TransportError(f"peer {peer!r} is not connected")
            address, reader = self._peers[peer].address, self._open_reader()
            check_spans(spans, remote_nbytes=address.nbytes, local_nbytes=reader.arena.nbytes)
            return reader.start(address, spans) if spans else CompletedTransfer()

    def disconnect(self, peer: str) -> None:
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None and self._reader is not None and not self._reader.closed:
                self._reader.unload(known.address.agent)

    def close(self) -> None:
        """Lets reads under way end first: over TCP, UCX aborts who still owes bytes."""
        for transfer in self._under_way():
            transfer.cancel()
        with self._lock, ExitStack() as stack:
            if self._server is not None:
                stack.callback(self._server.close)
            if self._reader is not None:
                stack.callback(self._reader.close, "the transport was closed")
            self._peers.clear()
            self._arena = self._server = None

    def _serve(self, arena: ArenaMemory) -> NixlServer:
        next_name = partial(_unique, self._agent_name)
        if arena.fd is None:
            return AgentHere(next_name(), _region(arena), _kind(arena), devices=self._devices)
        return OwnerProcess(next_name, arena.fd, arena.nbytes, devices=self._devices)

    def _under_way(self) -> tuple[NixlTransfer, ...]:
        with self._lock:
            return self._reader.under_way if self._reader is not None else ()

    def _open_reader(self) -> _Reader:
        if self._arena is None:
            raise TransportError("register an arena before connecting to peers")
        if self._reader is None or self._reader.closed:
            name = _unique(self._agent_name)
            self._reader = _Reader(name, self._arena, self._lock, devices=self._devices)
        return self._reader

    def _check_name(self, peer: str, agent: str) -> None:
        owners = [name for name, entry in self._peers.items() if entry.address.agent == agent]
        if owners and owners != [peer]:
            raise TransportError(f"{peer!r} announces the agent {agent} of {owners[0]!r}")


def _kind(arena: ArenaMemory) -> MemoryKind:
    return "DRAM" if arena.device_index is None else "VRAM"


def _region(arena: ArenaMemory) -> Region:
    return arena.data_ptr, arena.nbytes, arena.device_index or 0


def _unique(agent_name: str) -> str:
    """Each life gets its own name: NIXL refuses new metadata under a name that it knows."""
    return f"{agent_name}-{secrets.token_hex(8)}"
