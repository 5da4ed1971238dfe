"""The one contiguous allocation that holds a node's KV blocks and Mamba states.

Knows bytes only: the arena plan says where blocks and states lie. The arena may be on a device, so
only the model's operators (by `tensor`) and transports that register addresses (by `data_ptr`)
touch it directly. All other code gets host bytes through `read` and `writable`.

A device has two streams. Steps run on the engine's. Copies and digests run on the arena's side
stream, so that they neither wait for the running step nor delay it:

    host      launch N | launch N+1 | results of N | launch N+2 | ...
    engine's  | prepare N | step N          | prepare N+1 | step N+1        | prepare N+2 | ...
    side                       | copies, digests |        ^ mark

Nothing but these rules keeps the two in order, while a step is launched before the results of the
one before it are read:

- Bytes that a step wrote are read here only after the host has read that step's results, so its
  kernels have ended. A lease is granted, and blocks are published, saved or evicted, no earlier.
- Bytes that came are read by a step only if the host knew that they were all here (and equal, as
  digests say) when it launched the step.
- Blocks of requests in a step under way are neither freed nor loaded into before its results are
  read: the scheduler's part. But a step prepares blocks (zeroes states, copies shared blocks) that
  the very next load may fill, and reads sources of copies that may be evicted at once. So the
  engine marks its stream once a step is prepared (`mark_prepared`), and whoever loads waits for the
  mark: this stream by itself, threads that write past it (NIXL's) by `wait_for_prepared`.
- A peer that reads blocks of a lease, by whatever stream of its own, reads the lease's record when
  all have come. P clears the record before it launches anything that writes these blocks.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.digests import Spans, digest
from engine.errors import ConfigError
from engine.side_stream import SideStream

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Copying(Protocol):
    """Copies that a device makes by itself; a `torch.cuda.Event`.

    Raises RuntimeError when the device has failed.
    """

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class ArenaMemory:
    """`nbytes` zeroed bytes, page aligned, on the host or on one CUDA device.

    On the host it is an anonymous memory file (memfd), mapped shared: other processes of the same
    user can map it through `/proc/<pid>/fd/<fd>`, it has no name in any file system, and the kernel
    frees it with its last user even after SIGKILL. Seals forbid resizing, so a reader's mapping
    never faults with SIGBUS. `prefault` touches every page at start instead of in the first step.

    `tensor`: uint8, shape (nbytes,), zero-copy. `fd` is None on a device; `label` names the memfd.
    """

    __slots__ = ("_host", "_side", "_tensor", "device_index", "fd", "label", "nbytes")

    def __init__(self, nbytes: int, *, device: str = "cpu", prefault: bool = True) -> None:
        if nbytes < 1:
            raise ValueError(f"an arena needs at least 1 byte, got nbytes={nbytes}")
        self.nbytes = nbytes
        self.label = f"tandem-arena-{secrets.token_hex(8)}"
        self.fd: int | None = None
        self._tensor: torch.Tensor | None = None
        if torch.device(device).type == "cpu":
            self.fd, self._tensor = _sealed_memfd(self.label, nbytes, prefault=prefault)
        else:
            self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        # -1 on the host. `_host` is made once: a view costs microseconds, and hashing asks often.
        index = self._tensor.get_device()
        self.device_index: int | None = index if index >= 0 else None
        self._host = self._tensor.numpy().data if self.device_index is None else None
        self._side = None if self.device_index is None else SideStream(self.device_index)

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes, uint8, shape (nbytes,). Raises ValueError once closed."""
        if self._tensor is None:
            raise ValueError(f"{self.label} is closed")
        return self._tensor

    @property
    def data_ptr(self) -> int:
        """Address of byte 0. Raises ValueError once closed."""
        return self.tensor.data_ptr()

    def read(self, offset: int, length: int) -> memoryview:
        """Bytes from `offset` on, for the host: a view of a host arena, a copy of a device's.

        A copy waits for what is queued on the side stream. Raises ValueError once closed.
        """
        if self._host is not None:
            return self._host[offset : offset + length]
        part = self.tensor[offset : offset + length]
        with self.on_side_stream(after_mark=False):
            return self._buffer(length).copy_(part).numpy().data

    @contextmanager
    def writable(self, offset: int, length: int) -> Iterator[memoryview]:
        """Host memory to fill; when the block ends, the arena has its bytes from `offset` on.

        A host arena gives its own bytes, a device arena an empty buffer that is copied at the end.
        After an exception the bytes of a device stay as they were. Raises ValueError once closed.
        """
        if self._host is not None:
            yield self._host[offset : offset + length]
            return
        part, buffer = self.tensor[offset : offset + length], self._buffer(length)
        yield buffer.numpy().data
        with self.on_side_stream(after_mark=True):
            part.copy_(buffer)

    def digests(self, blocks: Sequence[Spans]) -> list[int]:
        """The digest of each of `blocks`, by the rule of `engine.digests`; each has a span.

        A device hashes its own bytes, best all that are wanted at once. Raises ValueError once
        closed.
        """
        if self.device_index is None or find_spec("triton") is None:
            return [digest(self.read, block) for block in blocks]
        # By name: a node on a CPU imports no Triton.
        kernels = import_module("engine.ops.digest.cuda")
        with self.on_side_stream(after_mark=False):
            found: list[int] = kernels.block_digests(self.tensor, blocks, self.read)
        return found

    def copy_from(self, source: torch.Tensor, spans: npt.NDArray[np.int64]) -> Copying:
        """Begins to copy `spans` [N, 3] of `source` uint8, on a device that this one can read.

        A row is the offset in the source, the offset here, and the bytes. They run on the side
        stream, after the mark; the source must stay until they have ended. A device's arena only.
        """
        assert self._side is not None
        with self.on_side_stream(after_mark=True):
            if find_spec("triton") is None:
                for start, to, length in spans.tolist():
                    self.tensor[to : to + length].copy_(source[start : start + length])
            else:
                kernels = import_module("engine.ops.copy_spans.cuda")
                kernels.copy_spans(source, self.tensor, spans)
            return self._side.event()

    def on_side_stream(self, *, after_mark: bool) -> AbstractContextManager[None]:
        """Torch's calls in the block run on a device's side stream. A host arena has none.

        `after_mark`: once the device has passed the last mark, as what writes must, and what reads
        bytes that a step has only copied. Other reads would wait for the running step in vain.
        """
        return nullcontext() if self._side is None else self._side.use(after_mark=after_mark)

    def mark_prepared(self) -> None:
        """The engine has queued a step's zeroes and copies of blocks; on the engine's thread."""
        if self._side is not None:
            self._side.mark()

    def wait_for_prepared(self) -> None:
        """Returns when what was marked is done: call before bytes are written into blocks."""
        if self._side is not None:
            self._side.wait_for_mark()

    @staticmethod
    def _buffer(length: int) -> torch.Tensor:
        # Page-locked, and torch keeps it for the next one: a card copies from and to other memory
        # at a third of the rate, and the pages of a fresh buffer cost more than the copy.
        return torch.empty(length, dtype=torch.uint8, pin_memory=True)

    def host_bytes(self) -> memoryview:
        """All bytes, writable and without a copy. Raises ValueError on a device or once closed."""
        if self.device_index is not None:
            raise ValueError(f"{self.label} is on device {self.device_index}, not on the host")
        return self.tensor.numpy().data  # `tensor` raises once closed

    def close(self) -> None:
        """Closes the descriptor now; the last tensor over the bytes frees them. Idempotent."""
        self._tensor = self._host = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def available_host_bytes() -> int:
    """Bytes that can be allocated without swapping, or the cgroup's limit if that is less."""
    # In a container /proc/meminfo shows the host; the cgroup has the limit that kills.
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return free if allowed == "max" else min(free, int(allowed))


def device_memory(device: str) -> tuple[int, int]:
    """Bytes that are free on a CUDA device, and those that it has.

    Raises ConfigError for one that this machine, or this build of torch, lacks.
    """
    num_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (torch.device(device).index or 0) >= num_found:
        raise ConfigError(
            f"--device {device}: torch {torch.__version__} finds {num_found} CUDA devices here"
        )
    return torch.cuda.mem_get_info(device)


def _sealed_memfd(label: str, nbytes: int, *, prefault: bool) -> tuple[int, torch.Tensor]:
    """The tensor owns the mapping: unmapping it by hand would leave torch's views dangling."""
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        tensor = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        if prefault:
            # MAP_POPULATE would hold the interpreter's lock, for a second per GB: the threads that
            # load the weights meanwhile would stand still.
            tensor.zero_()
        return fd, tensor
    except OSError:
        os.close(fd)
        raise
