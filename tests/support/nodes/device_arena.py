"""An arena that behaves as on a device, on the CPU: touching its bytes unasked ends the process.

Its pages can be neither read nor written but inside the arena's own operations, and while the
model runs (`kernels`). There is no mock in it: the model computes on these very bytes.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock

import torch

from engine.arena import ArenaMemory
from engine.digests import Spans, digest

_LIBC = ctypes.CDLL(None, use_errno=True)
_OPEN, _SHUT = mmap.PROT_READ | mmap.PROT_WRITE, 0


class DeviceArena(ArenaMemory):
    """Says that it is on device 0; has no descriptor that another process could map.

    `num_marks`: steps that were prepared by zeroes or copies, in all arenas.
    """

    num_marks = 0

    def __init__(self, nbytes: int, *, device: str = "cpu", prefault: bool = True) -> None:
        super().__init__(nbytes, device=device, prefault=prefault)
        assert self.fd is not None
        os.close(self.fd)
        self.fd, self.device_index, self._host = None, 0, None
        self._address = super().data_ptr
        self._lock = Lock()
        self._num_inside = 0
        self._protect(_SHUT)

    def mark_prepared(self) -> None:
        """Counts, as the CPU runs all in order."""
        DeviceArena.num_marks += 1

    def kernels(self) -> AbstractContextManager[None]:
        """The block runs the code that would run on the device."""
        return self._inside()

    def read(self, offset: int, length: int) -> memoryview:
        """A copy, as of a device's bytes."""
        with self._inside():
            return torch.clone(self.tensor[offset : offset + length]).numpy().data

    def on_side_stream(self, *, after_mark: bool) -> AbstractContextManager[None]:
        """The block's calls are the arena's own."""
        return self._inside()

    def digests(self, blocks: Sequence[Spans]) -> list[int]:
        """By the host's rule: the kernel's interpreter takes a second for a piece."""
        return [digest(self.read, block) for block in blocks]

    @contextmanager
    def writable(self, offset: int, length: int) -> Iterator[memoryview]:
        """A buffer, copied at the end."""
        buffer = torch.empty(length, dtype=torch.uint8)
        yield buffer.numpy().data
        with self._inside():
            self.tensor[offset : offset + length].copy_(buffer)

    def close(self) -> None:
        """Views that are left may be read again."""
        with suppress(ValueError):
            self._protect(_OPEN)
        super().close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._lock:
            self._protect(_OPEN)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._protect(_SHUT)

    def _protect(self, rights: int) -> None:
        _ = self.tensor  # raises once closed: nothing is mapped there any longer
        length = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        address = ctypes.c_void_p(self._address)
        if _LIBC.mprotect(address, ctypes.c_size_t(length), rights):
            raise OSError(ctypes.get_errno(), "mprotect")
