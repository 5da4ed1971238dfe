"""Reads from another process's arena on the same host: map its memfd read-only and copy.

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
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from connector.transports.base import (
    SpanPair,
    Transfer,
    TransferStatus,
    Transport,
    check_spans,
    decode_address,
)
from engine.arena import ArenaMemory
from engine.errors import TransportError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BLOCK_BYTES = 512  # the unit of st_blocks
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ShmAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="shm"):
    """Where a peer's memfd is, and enough of its identity to refuse a reused pid or descriptor."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    fd: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    inode: _Natural
    device: _Natural
    label: Annotated[str, msgspec.Meta(pattern=r"^tandem-arena-[0-9a-f]{16}$")]
    host: Annotated[str, msgspec.Meta(max_length=200)]


@dataclass(slots=True, frozen=True)
class _Mapping:
    address: bytes
    nbytes: int
    data: npt.NDArray[np.uint8]  # owns the mapping: a reader that holds it can never be unmapped


class ShmTransfer(Transfer):
    """Copies as far as it is waited for: whoever hashes what has come finds it in its cache."""

    __slots__ = ("_arena", "_here", "_lock", "_mapping", "_total", "_waiting", "_was_cancelled")

    def __init__(self, mapping: _Mapping, arena: torch.Tensor, spans: Sequence[SpanPair]) -> None:
        self._mapping = mapping
        self._arena = arena
        self._waiting = deque(spans)
        self._total = sum(span.length for span in spans)
        self._here = 0
        self._was_cancelled = False
        self._lock = Lock()

    def poll(self) -> TransferStatus:
        self._copy(self._total)
        return TransferStatus.DONE

    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        """The copy runs here: the caller is a pull thread, and memmove lets go of the GIL.

        In as few calls as possible, for long ones go past the cache.
        """
        self._copy(self._total if nbytes is None else nbytes)

    def cancel(self) -> None:
        with self._lock:
            self._was_cancelled |= bool(self._waiting)

    def _copy(self, wanted: int) -> None:
        source, target = self._mapping.data.ctypes.data, self._arena.data_ptr()
        with self._lock:
            if self._was_cancelled:
                raise TransportError("the read was cancelled")
            while self._waiting and self._here < wanted:
                remote, local, length = self._waiting.popleft()
                now = min(length, wanted - self._here)
                ctypes.memmove(target + local, source + remote, now)
                self._here += now
                if now < length:
                    rest = SpanPair(remote + now, local + now, length - now)
                    self._waiting.appendleft(rest)


class ShmTransport(Transport):
    """Same host, CPU arenas. `agent_name` is only kept for symmetry with the other transports."""

    name = "shm"

    def __init__(self, agent_name: str) -> None:
        self.agent_name = agent_name
        self._arena: ArenaMemory | None = None
        self._peers: dict[str, _Mapping] = {}
        self._lock = Lock()

    def register(self, arena: ArenaMemory) -> None:
        if self._arena is not None:
            raise TransportError(
                "this transport has an arena already; open one transport per arena"
            )
        if arena.fd is None:
            raise TransportError(
                "shm moves host memory only; use the nixl transport for a CUDA arena"
            )
        self._arena = arena

    @property
    def address(self) -> bytes:
        arena = self._arena
        if arena is None or arena.fd is None:
            raise TransportError("no arena is registered")
        info = os.fstat(arena.fd)
        return msgspec.msgpack.encode(
            ShmAddress(
                pid=os.getpid(),
                fd=arena.fd,
                nbytes=arena.nbytes,
                inode=info.st_ino,
                device=info.st_dev,
                label=arena.label,
                host=this_host(),
            )
        )

    def connect(self, peer: str, address: bytes) -> None:
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.address != address:
                self._peers[peer] = _open_mapping(address)

    def read(self, peer: str, spans: Sequence[SpanPair]) -> Transfer:
        mapping, arena = self._peers.get(peer), self._arena
        if mapping is None:
            raise TransportError(f"peer {peer!r} is not connected")
        if arena is None:
            raise TransportError("register an arena before reading")
        check_spans(spans, remote_nbytes=mapping.nbytes, local_nbytes=arena.nbytes)
        return ShmTransfer(mapping, arena.tensor, spans)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._peers.pop(peer, None)

    def close(self) -> None:
        with self._lock:
            self._peers.clear()
            self._arena = None


def this_host() -> str:
    """One life of one kernel, and what this process sees of its /proc."""
    boot = BOOT_ID.read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def host_of(address: bytes) -> str:
    """`this_host` of the process whose address that is; raises TransportError."""
    return decode_address(address, ShmAddress).host


def why_out_of_reach(here: str, there: str) -> str | None:
    """Why processes of the one host cannot see the other's memory; None when they can."""
    if here == there:
        return None
    return f"the peer runs on another host, or in another pid namespace: {there}, and not {here}"


def _open_mapping(blob: bytes) -> _Mapping:
    address = decode_address(blob, ShmAddress)
    if (reason := why_out_of_reach(this_host(), address.host)) is not None:
        raise TransportError(f"cannot map the peer's memory: {reason}")
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        fd = _open_verified(path, address)
        try:
            # MAP_POPULATE: the page tables are filled now, not by faults inside the first read.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(fd, address.nbytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except OSError as error:
        raise TransportError(
            f"cannot map {path} ({error.strerror}): the peer is gone, or runs as another user"
        ) from error
    return _Mapping(blob, address.nbytes, np.frombuffer(mapped, dtype=np.uint8))


def _open_verified(path: str, address: ShmAddress) -> int:
    """Check through an O_PATH handle first: to open an unknown file may block or have effects."""
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _check_identity(os.fstat(handle), os.readlink(path), address)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        os.close(fd)
        raise TransportError(f"{path} is not sealed against shrinking; reading it could crash us")
    return fd


def _check_identity(info: os.stat_result, link: str, address: ShmAddress) -> None:
    found = (info.st_dev, info.st_ino, info.st_size, link)
    wanted = (address.device, address.inode, address.nbytes, f"/memfd:{address.label} (deleted)")
    if not stat.S_ISREG(info.st_mode) or found != wanted:
        raise TransportError(
            f"pid {address.pid} holds another file than announced: wanted "
            f"(device, inode, size, name) {wanted}, found {found}; "
            "the peer restarted, or runs elsewhere"
        )
    if info.st_blocks * _BLOCK_BYTES < address.nbytes:
        raise TransportError(
            f"pid {address.pid} announces {address.nbytes} B and has {info.st_blocks} blocks of "
            f"{_BLOCK_BYTES} B: mapping it would take memory for the rest"
        )
