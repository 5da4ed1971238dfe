"""Reads from another process's memory on the same host: map its memfds read-only and copy.

Knows Linux: memfd, /proc and seals. A killed peer leaves our mapping whole, so a read from it still
succeeds with the bytes it had; whether they are still wanted is for the lease to say.
"""

import ctypes
import fcntl
import mmap
import os
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from connector.transports.address import Natural, Nbytes, PerRegion, decode_address
from connector.transports.arena_transport import ArenaTransport, RemoteMemory
from connector.transports.base import SpanPair, Transfer
from connector.transports.polled_transfer import PolledTransfer
from engine.arena import ArenaMemory
from engine.errors import TransportError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OTHER_WAYS = "transport auto, nixl, ucx or zmq on both nodes reaches others"
_BLOCK_BYTES = 512  # the unit of st_blocks


class ShmRegion(msgspec.Struct, frozen=True):
    """One memfd, with enough of its identity to refuse a reused pid or descriptor."""

    fd: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    nbytes: Nbytes
    inode: Natural
    device: Natural
    label: Annotated[str, msgspec.Meta(pattern=r"^tandem-arena-[0-9a-f]{16}$")]


class ShmAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="shm"):
    """A peer's process and its memfds."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    host: Annotated[str, msgspec.Meta(max_length=200)]
    regions: Annotated[tuple[ShmRegion, ...], PerRegion]


@dataclass(slots=True)
class _Mapped(RemoteMemory):
    """`data`: the mapped regions. A reader that holds one keeps it from being unmapped."""

    address: ShmAddress
    data: list[npt.NDArray[np.uint8]] = field(default_factory=list)


class ShmTransfer(PolledTransfer):
    """Copies only as far as it is waited for, so that a hasher finds those bytes in its cache.

    The caller copies, as it is a pull thread and memmove lets go of the GIL.
    """

    def __init__(
        self,
        peer: str,
        data: npt.NDArray[np.uint8],
        spans: Sequence[SpanPair],
        *,
        local: ArenaMemory,
    ) -> None:
        super().__init__(peer, sum(span.length for span in spans), Lock())
        self._data = data
        self._local = local.tensor  # keeps the memory mapped while it is written
        self._waiting = deque(spans)

    def cancel(self) -> None:
        with self._lock:
            if self.is_open:
                self.failure = f"the read from {self.peer} was cancelled"

    def _advance(self, wanted: int) -> None:
        source, target = self._data.ctypes.data, self._local.data_ptr()
        # Few calls, as long ones go past the cache.
        while self._waiting and self.here < wanted:
            remote, local, length = self._waiting.popleft()
            # The rest of a span that reaches beyond `wanted` waits for the next call.
            now = min(length, wanted - self.here)
            ctypes.memmove(target + local, source + remote, now)
            self.here += now
            if now < length:
                self._waiting.appendleft(SpanPair(remote + now, local + now, length - now))
        self.is_done = not self._waiting

    def _pause(self, waited_s: float, left_s: float) -> None:
        """Nothing to wait for: what is wanted has been copied."""


@dataclass(slots=True, frozen=True)
class _Memfds:
    """Memory that the kernel serves to processes of the same user, as long as it is there."""

    address: bytes

    def close(self) -> None:
        pass


class ShmTransport(ArenaTransport[_Mapped]):
    """Host memory of processes of one user on one host."""

    name = "shm"

    def _serve(self) -> _Memfds:
        announced = tuple(map(memfd_of, self._regions))
        address = ShmAddress(os.getpid(), this_host(), announced)
        return _Memfds(msgspec.msgpack.encode(address))

    def _decode(self, peer: str, blob: bytes) -> _Mapped:
        address = decode_address(blob, ShmAddress)
        if (reason := why_out_of_reach(this_host(), address.host)) is not None:
            raise TransportError(f"cannot map the peer's memory: {reason}; {OTHER_WAYS}")
        return _Mapped(peer, blob, tuple(region.nbytes for region in address.regions), address)

    def _open(self, remote: _Mapped) -> None:
        address = remote.address
        remote.data = [map_memfd(address.pid, region) for region in address.regions]

    def _start(self, remote: _Mapped, spans: Sequence[SpanPair], region: int) -> Transfer:
        local = self._regions[region]
        return ShmTransfer(remote.name, remote.data[region], spans, local=local)


def this_host() -> str:
    """One life of one kernel, and what this process sees of its /proc."""
    boot = BOOT_ID.read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def why_out_of_reach(here: str, there: str) -> str | None:
    """Why processes of the one host cannot see the other's memory; None when they can."""
    if here == there:
        return None
    return f"the peer runs on another host, or in another pid namespace: {there}, and not {here}"


def memfd_of(region: ArenaMemory) -> ShmRegion:
    """Names host memory of this process to others. Raises TransportError for any other memory."""
    if region.fd is None:
        raise TransportError(f"{region.label} is closed, or on a device")
    info = os.fstat(region.fd)
    return ShmRegion(region.fd, region.nbytes, info.st_ino, info.st_dev, region.label)


def map_memfd(pid: int, region: ShmRegion) -> npt.NDArray[np.uint8]:
    """All bytes of a peer's memfd, shape (nbytes,), read-only. Raises TransportError."""
    path = f"/proc/{pid}/fd/{region.fd}"
    try:
        with _open_verified(path, pid, region) as file:
            # Without this seal a peer could shrink it, and our next read would end in SIGBUS.
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise TransportError(f"{path} is not sealed against shrinking, and could crash us")
            # MAP_POPULATE: the page tables are filled now, not by faults inside the first read.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(file.fileno(), region.nbytes, flags=flags, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransportError(
            f"cannot map {path} ({error.strerror}): the peer is gone, or runs as another user; "
            f"{OTHER_WAYS}"
        ) from error
    return np.frombuffer(mapped, dtype=np.uint8)


def _open_verified(path: str, pid: int, region: ShmRegion) -> BinaryIO:
    # First through an O_PATH handle: to open an unknown file may block or have effects.
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _check_identity(os.fstat(handle), os.readlink(path), pid, region=region)
        return open(f"/proc/self/fd/{handle}", "rb")
    finally:
        os.close(handle)


def _check_identity(info: os.stat_result, link: str, pid: int, *, region: ShmRegion) -> None:
    found = (info.st_dev, info.st_ino, info.st_size, link)
    wanted = (region.device, region.inode, region.nbytes, f"/memfd:{region.label} (deleted)")
    if not stat.S_ISREG(info.st_mode) or found != wanted:
        raise TransportError(
            f"pid {pid} holds another file than announced: wanted "
            f"(device, inode, size, name) {wanted}, found {found}; "
            "the peer restarted, or runs elsewhere"
        )
    # A sparse file costs its owner nothing, and would cost us all of its size when it is mapped.
    if info.st_blocks * _BLOCK_BYTES < region.nbytes:
        raise TransportError(
            f"pid {pid} announces {region.nbytes} B and has {info.st_blocks} blocks of "
            f"{_BLOCK_BYTES} B: mapping it would take memory for the rest"
        )
