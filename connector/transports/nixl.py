"""Reads over NIXL's UCX backend: RDMA and GPU memory where there is hardware, CMA or TCP elsewhere.

Knows peers, spans and what may go wrong between them; the bindings are `nixl_agent.py`'s business.
UCX reads its own settings (`UCX_TLS`) from the environment; none is needed.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import RLock

from connector.transports.address import decode_address
from connector.transports.arena_transport import ArenaTransport, RemoteMemory
from connector.transports.base import SpanPair, Transfer
from connector.transports.nixl_agent import NixlAddress, NixlAgent, NixlRegion, load_nixl
from connector.transports.nixl_server import OwnerProcess
from connector.transports.polled_transfer import DrainedTransfer
from connector.transports.ucx_worker import network_devices
from engine.errors import TransportError

_BUSY_POLL_S = 50e-6
_MIN_SLEEP_S = 20e-6
_MAX_SLEEP_S = 500e-6
_REQUEST_BYTES = 8 << 20
_FAST_S = 2e-3  # 8 MiB between two processes took 0.6 ms by cuda_ipc, and 14 ms by TCP
_READS_BY_CUDA_IPC = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
"""UCX takes cuda_ipc for reads where it sees NVLink only, and else copies through the host."""
_MAX_UNLOADED = 8  # connections that an agent may have closed before another takes its place


class NixlTransfer(DrainedTransfer[SpanPair]):
    """A read as requests, one after the other; runs under the transport's lock.

    A request is one span, because UCX 1.21 over TCP aborts the process that serves a queued read of
    a reader that has just died (`nixl_server` starts another). One at a time makes that rare; RDMA
    and same-host paths are free of it. Where UCX has copied all when a request is posted, on the
    same host, nothing is ever queued: there the next request is several spans.

    Between two devices a request is as many spans as it has room for, and has twice the room after
    one that was quick: then nothing crossed the host, and every request costs the same.

        spans   |----a----|--b--|----------c----------|
                |  here   |arriving|     waiting      |
    """

    def __init__(
        self, reader: "_Reader", peer: NixlAddress, spans: Sequence[SpanPair], region: int
    ) -> None:
        super().__init__(peer.agent, sum(span.length for span in spans), reader.lock)
        self._reader = reader
        self._local, self._remote = reader.agent.regions[region], peer.regions[region]
        self.waiting.extend(spans)
        self._arriving = 0
        self._copies_at_once = False
        self._on_devices = self._local.memory == self._remote.memory == "VRAM"
        self._room = _REQUEST_BYTES
        self._posted_at = 0.0
        self._request: int | None = None

    def start(self) -> None:
        """Post the first request. Raises TransportError with everything released."""
        self._reader.live.add(self)
        self._advance(1)

    def fail(self, reason: str) -> None:
        """End it; what is under way still arrives (see `_Reader`)."""
        self.failure = reason
        self._reader.live.discard(self)
        self._release()

    def _advance(self, wanted: int) -> None:
        try:
            while self._is_idle() and self.waiting and self.here < wanted:
                self._post(wanted)
        except TransportError as error:
            # Its endpoint is dead; the next read makes a new one.
            self.fail(str(error))
            self._reader.unload(self.peer, f"{self.peer} was disconnected")
            raise
        if self._request is None and not self.waiting:
            self.is_done = True
            self._reader.live.discard(self)

    def _is_idle(self) -> bool:
        """True when the request under way, if any, has ended."""
        if self._request is not None and self._reader.agent.is_done(self._request):
            self._arrived()
        return self._request is None

    def _post(self, wanted: int) -> None:
        """The next request; `wanted` bytes should be here then, if it may have several spans."""
        spans = [self._next_span(self._room)]
        most = min(wanted - self.here, _REQUEST_BYTES) if self._copies_at_once else 0
        most = self._room if self._on_devices else most
        while self.waiting and self._arriving < most:
            spans.append(self._next_span(most - self._arriving))
        agent = self._reader.agent
        self._request = agent.prepare(self.peer, spans, local=self._local, remote=self._remote)
        self._posted_at = time.monotonic()
        self._copies_at_once = agent.post(self._request)
        if self._copies_at_once:
            self._arrived()

    def _next_span(self, most: int) -> SpanPair:
        """At most `most` bytes of the next span; the rest stays."""
        remote, local, length = self.waiting.popleft()
        if length > most:
            self.waiting.appendleft(SpanPair(remote + most, local + most, length - most))
        self._arriving += min(length, most)
        return SpanPair(remote, local, min(length, most))

    def _arrived(self) -> None:
        self._release()
        is_quick = time.monotonic() - self._posted_at < _FAST_S
        if self._on_devices and is_quick and self._arriving == self._room:
            self._room *= 2
        self.here += self._arriving
        self._arriving = 0

    def _release(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            self._reader.agent.release(request)

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

    def __init__(self, agent: NixlAgent, lock: RLock) -> None:
        self.agent = agent
        self.lock = lock
        self.closed = False
        self.live: set[NixlTransfer] = set()  # neither ended nor failed
        self._loaded: set[str] = set()
        self._num_unloaded = 0

    def load(self, peer: NixlAddress) -> None:
        if peer.agent not in self._loaded:
            self.agent.load(peer.metadata, peer.agent)
            self._loaded.add(peer.agent)

    def unload(self, agent: str, reason: str) -> None:
        """Close the connection to a peer; with a read from it under way, close the reader.

        Also after many connections, as soon as nothing is under way.
        """
        if any(transfer.peer == agent for transfer in self.live):
            self.close(reason)
        elif agent in self._loaded:
            self._loaded.discard(agent)
            self.agent.unload(agent)
            self._num_unloaded += 1
            if self._num_unloaded >= _MAX_UNLOADED and not self.live:
                self.close("its connections have been closed")

    def close(self, reason: str) -> None:
        """Fail what is under way and free the agent. Idempotent."""
        if self.closed:
            return
        self.closed = True
        with ExitStack() as stack:  # runs bottom up, every step even if one fails
            stack.callback(self.agent.close)
            while self._loaded:
                stack.callback(self.agent.unload, self._loaded.pop())
            for transfer in tuple(self.live):
                stack.callback(transfer.fail, reason)


@dataclass(slots=True)
class _Peer(RemoteMemory):
    address: NixlAddress


class NixlTransport(ArenaTransport[_Peer]):
    """Host or CUDA memory, one host or many. Raises ConfigError when nixl is not installed."""

    name = "nixl"
    package = "nixl"
    moves_devices = True

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        super().__init__(agent_name, host)
        load_nixl()
        self._devices = network_devices(host)
        self._reader: _Reader | None = None

    def _serve(self) -> NixlAgent | OwnerProcess:
        if any(region.device_index is not None for region in self._regions):
            os.environ.setdefault(*_READS_BY_CUDA_IPC)
        self._open_reader()  # a process's first one takes UCX 0.4 s, which no request waits for
        memfds = [(it.fd, it.nbytes) for it in self._regions if it.fd is not None]
        if len(memfds) == len(self._regions):
            return OwnerProcess(self.agent_name, memfds, devices=self._devices)
        # Memory of a device belongs to the process that allocated it.
        return self._open_agent(progress_thread=True)

    def _decode(self, peer: str, blob: bytes) -> _Peer:
        address = decode_address(blob, NixlAddress)
        for name, other in self._peers.items():
            if name != peer and other.address.agent == address.agent:
                raise TransportError(f"{peer!r} announces the agent {address.agent} of {name!r}")
        return _Peer(peer, blob, tuple(region.nbytes for region in address.regions), address)

    def _open(self, remote: _Peer) -> None:
        self._open_reader().load(remote.address)

    def _start(self, remote: _Peer, spans: Sequence[SpanPair], region: int) -> Transfer:
        reader = self._open_reader()
        reader.load(remote.address)
        transfer = NixlTransfer(reader, remote.address, spans, region)
        transfer.start()
        return transfer

    def _drop(self, remote: _Peer, reason: str) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.unload(remote.address.agent, reason)

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.close("the transport was closed")

    def _open_reader(self) -> _Reader:
        if self._reader is None or self._reader.closed:
            self._reader = _Reader(self._open_agent(progress_thread=False), self._lock)
        return self._reader

    def _open_agent(self, *, progress_thread: bool) -> NixlAgent:
        described = [
            NixlRegion(it.data_ptr, it.nbytes, "DRAM", 0)
            if it.device_index is None
            else NixlRegion(it.data_ptr, it.nbytes, "VRAM", it.device_index)
            for it in self._regions
        ]
        return NixlAgent(
            self.agent_name, described, progress_thread=progress_thread, devices=self._devices
        )
