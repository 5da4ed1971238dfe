"""Reads over NIXL's UCX backend: RDMA and GPU memory where there is hardware, CMA or TCP elsewhere.

Knows peers, spans and what may go wrong between them; the bindings are `nixl_agent.py`'s business.
UCX reads its own settings (`UCX_TLS`) from the environment; none is needed.
"""

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import RLock

from connector.transports.address import decode_address
from connector.transports.arena_transport import ArenaTransport, RemoteMemory
from connector.transports.base import SpanPair, Transfer, TransferStatus
from connector.transports.nixl_agent import NixlAddress, NixlAgent, NixlRegion, load_nixl
from connector.transports.nixl_server import OwnerProcess
from connector.transports.polled_transfer import DrainedTransfer
from connector.transports.ucx_worker import network_devices
from engine.arena import ArenaMemory
from engine.errors import TransportError

_BUSY_POLL_S = 50e-6
_MIN_SLEEP_S = 20e-6
_MAX_SLEEP_S = 500e-6
_REQUEST_BYTES = 8 << 20
_MAX_UNLOADED = 8  # connections that an agent may have closed before another takes its place


class NixlTransfer(DrainedTransfer[SpanPair]):
    """A read as requests, one after the other; runs under the transport's lock.

    A request is one span, because UCX 1.21 over TCP aborts the process that serves a queued read of
    a reader that has just died (`nixl_server` starts another). One at a time makes that rare; RDMA
    and same-host paths are free of it. Where UCX has copied all when a request is posted, on the
    same host, nothing is ever queued: there the next request is several spans.

        spans   |----a----|--b--|----------c----------|
                |  here   |arriving|     waiting      |
    """

    def __init__(
        self, reader: "_Reader", remote: NixlAddress, spans: Sequence[SpanPair], region: int
    ) -> None:
        super().__init__(remote.agent, sum(span.length for span in spans), reader.lock)
        self._reader = reader
        self.remote = remote
        self.region = region
        self.waiting.extend(spans)
        self.arriving = 0
        self.copies_at_once = False
        self.request: int | None = None

    def next_spans(self, wanted: int) -> list[SpanPair]:
        """The next request; `wanted` bytes should be here then, if it may have several spans."""
        spans = [self._next_span(_REQUEST_BYTES)]
        most = min(wanted - self.here, _REQUEST_BYTES) if self.copies_at_once else 0
        while self.waiting and self.arriving < most:
            spans.append(self._next_span(most - self.arriving))
        return spans

    def _next_span(self, most: int) -> SpanPair:
        """At most `most` bytes of the next span; the rest stays."""
        remote, local, length = self.waiting.popleft()
        if length > most:
            self.waiting.appendleft(SpanPair(remote + most, local + most, length - most))
        self.arriving += min(length, most)
        return SpanPair(remote, local, min(length, most))

    def _advance(self, wanted: int) -> None:
        self._reader.advance(self, wanted)

    def _pause(self, waited_s: float, left_s: float) -> None:
        # Busy for a moment, then with growing pauses: other threads need the core and the GIL.
        if waited_s >= _BUSY_POLL_S:
            time.sleep(min(max(waited_s / 2, _MIN_SLEEP_S), _MAX_SLEEP_S))

    def _close_connection(self, reason: str) -> None:
        self._reader.close(reason)


class _Reader:
    """The agent that reads. Apart from the one that serves, because it must be able to die.

    NIXL has no abort: releasing a read that is under way frees its handle, and its bytes still
    arrive (ai-dynamo/nixl#2044). So a cancelled read first drains. If the peer does not answer,
    only closing the whole agent keeps its bytes out of our memory; the next read opens a new one,
    and peers that read from us notice nothing. Closing it also gives sockets back: those of a
    connection to a peer that lives stay open on both sides otherwise (ai-dynamo/nixl#2025).
    """

    def __init__(
        self, name: str, regions: Sequence[NixlRegion], lock: RLock, *, devices: str
    ) -> None:
        self.lock = lock
        self.closed = False
        self._regions = regions
        self._agent = NixlAgent(name, regions, progress_thread=False, devices=devices)
        self._loaded: set[str] = set()
        self._num_unloaded = 0
        self.live: set[NixlTransfer] = set()  # neither ended nor failed

    def load(self, peer: NixlAddress) -> None:
        """Make the peer known to this reader, unless it is."""
        if peer.agent not in self._loaded:
            self._agent.load(peer.metadata, peer.agent)
            self._loaded.add(peer.agent)

    def unload(self, agent: str, reason: str) -> None:
        """Close the connection to a peer; with a read from it under way, close the reader.

        Also after many connections, as soon as nothing is under way.
        """
        if any(transfer.peer == agent for transfer in self.live):
            self.close(reason)
        elif agent in self._loaded:
            self._loaded.discard(agent)
            self._agent.unload(agent)
            self._num_unloaded += 1
            if self._num_unloaded >= _MAX_UNLOADED and not self.live:
                self.close("its connections have been closed")

    def start(self, peer: NixlAddress, spans: Sequence[SpanPair], region: int) -> NixlTransfer:
        """Post the first request. Raises TransportError with everything released."""
        self.load(peer)
        transfer = NixlTransfer(self, peer, spans, region)
        self.live.add(transfer)
        self.advance(transfer, 1)
        return transfer

    def advance(self, transfer: NixlTransfer, wanted: int) -> None:
        """Progress the request under way and post the next ones, until `wanted` bytes are here."""
        try:
            while True:
                if transfer.request is not None and self._agent.is_done(transfer.request):
                    self._arrived(transfer)
                is_idle = transfer.request is None
                if not is_idle or not transfer.waiting or transfer.here >= wanted:
                    break
                self._post(transfer, transfer.next_spans(wanted))
            if transfer.request is None and not transfer.waiting:
                transfer.status = TransferStatus.DONE
                self.live.discard(transfer)
        except TransportError as error:
            # Its endpoint is dead; the next read makes a new one.
            self._fail(transfer, str(error))
            self.unload(transfer.peer, f"{transfer.peer} was disconnected")
            raise

    def close(self, reason: str) -> None:
        """Fail what is under way and free the agent. Idempotent."""
        if self.closed:
            return
        self.closed = True
        with ExitStack() as stack:  # runs bottom up, every step even if one fails
            stack.callback(self._agent.close)
            for agent in self._loaded:
                stack.callback(self._agent.unload, agent)
            for transfer in tuple(self.live):
                stack.callback(self._fail, transfer, reason)

    def _post(self, transfer: NixlTransfer, spans: Sequence[SpanPair]) -> None:
        local, remote = self._regions[transfer.region], transfer.remote.regions[transfer.region]
        transfer.request = self._agent.prepare(transfer.peer, spans, local=local, remote=remote)
        transfer.copies_at_once = self._agent.post(transfer.request)
        if transfer.copies_at_once:
            self._arrived(transfer)

    def _arrived(self, transfer: NixlTransfer) -> None:
        self._release(transfer)
        transfer.here += transfer.arriving
        transfer.arriving = 0

    def _fail(self, transfer: NixlTransfer, reason: str) -> None:
        transfer.failure = reason
        self.live.discard(transfer)
        self._release(transfer)

    def _release(self, transfer: NixlTransfer) -> None:
        request, transfer.request = transfer.request, None
        if request is not None:
            self._agent.release(request)


@dataclass(slots=True)
class _Peer(RemoteMemory):
    address: NixlAddress


class NixlTransport(ArenaTransport[_Peer]):
    """Host or CUDA memory, one host or many. Raises ConfigError when nixl is not installed."""

    name = "nixl"
    moves_devices = True

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        super().__init__(agent_name, host)
        load_nixl()
        self._devices = network_devices(host).get("NET_DEVICES", "")
        self._reader: _Reader | None = None

    def _serve(self) -> NixlAgent | OwnerProcess:
        self._open_reader()  # a process's first one takes UCX 0.4 s, which no request waits for
        next_name = partial(_unique, self.agent_name)
        memfds = [(it.fd, it.nbytes) for it in self._regions if it.fd is not None]
        if len(memfds) == len(self._regions):
            return OwnerProcess(next_name, memfds, devices=self._devices)
        # Memory of a device belongs to the process that allocated it.
        described = list(map(_describe, self._regions))
        return NixlAgent(next_name(), described, progress_thread=True, devices=self._devices)

    def _decode(self, peer: str, blob: bytes) -> _Peer:
        address = decode_address(blob, NixlAddress)
        for name, other in self._peers.items():
            if name != peer and other.address.agent == address.agent:
                raise TransportError(f"{peer!r} announces the agent {address.agent} of {name!r}")
        return _Peer(blob, tuple(region.nbytes for region in address.regions), address)

    def _open(self, remote: _Peer) -> None:
        self._open_reader().load(remote.address)

    def _start(self, remote: _Peer, spans: Sequence[SpanPair], region: int) -> Transfer:
        return self._open_reader().start(remote.address, spans, region)

    def _drop(self, remote: _Peer, reason: str) -> None:
        with self._lock:
            if self._reader is not None and not self._reader.closed:
                self._reader.unload(remote.address.agent, reason)

    def _under_way(self) -> tuple[NixlTransfer, ...]:
        with self._lock:
            return tuple(self._reader.live) if self._reader is not None else ()

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.close("the transport was closed")

    def _open_reader(self) -> _Reader:
        if self._reader is None or self._reader.closed:
            described = list(map(_describe, self._regions))
            name = _unique(self.agent_name)
            self._reader = _Reader(name, described, self._lock, devices=self._devices)
        return self._reader


def _describe(memory: ArenaMemory) -> NixlRegion:
    if memory.device_index is None:
        return NixlRegion(memory.data_ptr, memory.nbytes, "DRAM", 0)
    return NixlRegion(memory.data_ptr, memory.nbytes, "VRAM", memory.device_index)


def _unique(agent_name: str) -> str:
    """Each life gets its own name: NIXL refuses new metadata under a name that it knows."""
    return f"{agent_name}-{secrets.token_hex(8)}"
