"""Reads from the device memory of another process on the same host: open its handle and copy.

Of each region its owner tells how to reach it: a device's by a CUDA IPC handle, host memory (the
records of leases) by a memfd, as `shm` does. Copies run on the side stream of the arena that reads.
Knows no CUDA call; those are `cuda_memory.py`'s.
"""

import os
import select
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from connector.transports.address import PerRegion, decode_address
from connector.transports.arena_transport import ArenaTransport, RemoteMemory
from connector.transports.base import SpanPair, Transfer
from connector.transports.cuda_memory import CudaMemory, DeviceRegion, OpenedMemory
from connector.transports.polled_transfer import PolledTransfer
from connector.transports.shm import (
    ShmRegion,
    ShmTransfer,
    map_memfd,
    memfd_of,
    this_host,
    why_out_of_reach,
)
from engine.arena import Copying
from engine.errors import TransportError

OTHER_WAYS = "transport auto, nixl or zmq on both nodes reaches others"
_BUSY_POLL_S = 50e-6
_MIN_SLEEP_S, _MAX_SLEEP_S = 20e-6, 500e-6


class HostRegion(ShmRegion, frozen=True, tag_field="memory", tag="host"):
    """Host memory of a node whose arena is on a device."""


class CudaIpcAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="cuda_ipc"):
    """A peer's process, and how its regions are reached."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    host: Annotated[str, msgspec.Meta(max_length=200)]
    regions: Annotated[tuple[HostRegion | DeviceRegion, ...], PerRegion]


Mapped = OpenedMemory | npt.NDArray[np.uint8]
"""All bytes of a peer's region, on a device or in host memory."""


@dataclass(slots=True)
class _Opened(RemoteMemory):
    """`regions`: what has been opened, in their order. `process`: a pidfd.

    `live`: reads whose copies may still run; no handle is closed under them.
    """

    address: CudaIpcAddress
    process: int | None = None
    regions: list[Mapped] = field(default_factory=list)
    live: set["CudaIpcTransfer"] = field(default_factory=set)


class CudaIpcTransfer(PolledTransfer):
    """One launch for all spans: they come together, and nothing can stop them.

    host    | read: queue | poll ... poll: the event has come |  or  | cancel: waits for it |
    device                |====== copies ======| event
    """

    def __init__(self, remote: _Opened, nbytes: int, copying: Copying) -> None:
        super().__init__(remote.name, nbytes, Lock())
        self._live = remote.live
        self._copying = copying
        self._live.add(self)

    def cancel(self) -> None:
        with self._lock:
            if not self.is_open:
                return
            try:
                # The blocks may be somebody else's as soon as this returns.
                self._copying.synchronize()
            except RuntimeError as error:
                self._failed(error)
            else:
                self._ended(f"the read from {self.peer} was cancelled")

    def _advance(self, wanted: int) -> None:
        try:
            if self._copying.query():
                self._ended(None)
        except RuntimeError as error:
            self._failed(error)

    def _pause(self, waited_s: float, left_s: float) -> None:
        # Busy for a moment, as most copies take less; other threads need the core and the GIL.
        if waited_s >= _BUSY_POLL_S:
            time.sleep(min(max(waited_s / 2, _MIN_SLEEP_S), _MAX_SLEEP_S, left_s))

    def _ended(self, failure: str | None) -> None:
        self.failure, self.is_done = failure, failure is None
        self.here = self._end - 1 if self.is_done else 0
        self._live.discard(self)

    def _failed(self, error: RuntimeError) -> None:
        """Torch raises RuntimeErrors for whatever a device reports."""
        self._ended(f"the device could not copy from {self.peer}: {error}")


@dataclass(slots=True, frozen=True)
class _Announced:
    """Memory that the driver and the kernel serve to processes of the same user."""

    address: bytes

    def close(self) -> None:
        pass


class CudaIpcTransport(ArenaTransport[_Opened]):
    """Memory of CUDA devices, of processes of one user on one host; no network, no NVLink needed.

    Raises TransportError for another host or pid namespace, this very process, a device that is not
    visible here or has no way to ours, a process that has ended, and regions of another kind.
    """

    name = "cuda_ipc"
    moves_devices = True
    moves_hosts = False
    memory: type[CudaMemory] = CudaMemory

    def __init__(self, agent_name: str, host: str = "127.0.0.1") -> None:
        super().__init__(agent_name, host)
        self._memory: CudaMemory | None = None

    def _serve(self) -> _Announced:
        self._memory = self.memory()
        regions: list[HostRegion | DeviceRegion] = []
        for it in self._regions:
            if it.device_index is None:
                regions.append(HostRegion(**msgspec.structs.asdict(memfd_of(it))))
            else:
                regions.append(self._memory.export(it))
        address = CudaIpcAddress(os.getpid(), this_host(), tuple(regions))
        return _Announced(msgspec.msgpack.encode(address))

    def _decode(self, peer: str, blob: bytes) -> _Opened:
        address = decode_address(blob, CudaIpcAddress)
        if (reason := why_out_of_reach(this_host(), address.host)) is not None:
            raise TransportError(f"cannot open the peer's memory: {reason}; {OTHER_WAYS}")
        kinds = [isinstance(region, DeviceRegion) for region in address.regions]
        ours = [region.device_index is not None for region in self._regions]
        if any(here != there for here, there in zip(ours, kinds, strict=False)):
            raise TransportError(f"one of two arenas is on a device, the other not; {OTHER_WAYS}")
        return _Opened(peer, blob, tuple(region.nbytes for region in address.regions), address)

    def _open(self, remote: _Opened) -> None:
        pid, memory = remote.address.pid, self._memory
        assert memory is not None
        with ExitStack() as undo:
            undo.callback(self._drop, remote, "it could not be opened")
            try:
                # Before its memory: then what is opened is that of the process that is watched.
                remote.process = os.pidfd_open(pid)
            except OSError as error:
                raise TransportError(
                    f"process {pid} of the peer cannot be watched ({error.strerror}); {OTHER_WAYS}"
                ) from error
            for region, local in zip(remote.address.regions, self._regions, strict=False):
                if isinstance(region, DeviceRegion):
                    assert local.device_index is not None
                    remote.regions.append(memory.open(region, local.device_index))
                else:
                    remote.regions.append(map_memfd(pid, region))
            undo.pop_all()

    def _start(self, remote: _Opened, spans: Sequence[SpanPair], region: int) -> Transfer:
        local, source = self._regions[region], remote.regions[region]
        if not isinstance(source, OpenedMemory):
            return ShmTransfer(remote.name, source, spans, local=local)
        if remote.process is None or _has_ended(remote.process):
            raise TransportError(f"the process of {remote.name} has ended, and its device's memory")
        nbytes = sum(span.length for span in spans)
        try:
            copying = local.copy_from(source.content, np.array(spans, np.int64).reshape(-1, 3))
        except RuntimeError as error:
            raise TransportError(f"cannot copy from {remote.name}: {error}") from error
        return CudaIpcTransfer(remote, nbytes, copying)

    def _drop(self, remote: _Opened, reason: str) -> None:
        # Copies end before their source is unmapped: a device that reads what is not there fails
        # for good, with all that its process does.
        for transfer in tuple(remote.live):
            transfer.cancel()
        with ExitStack() as stack:  # every step even if one fails
            process, remote.process = remote.process, None
            if process is not None:
                stack.callback(os.close, process)
            for mapped in remote.regions:
                if isinstance(mapped, OpenedMemory) and self._memory is not None:
                    stack.callback(self._memory.close, mapped)
            remote.regions = []


def _has_ended(process: int) -> bool:
    """True of the pidfd of a process that is no more."""
    ended = select.poll()
    ended.register(process, select.POLLIN)
    return bool(ended.poll(0))
