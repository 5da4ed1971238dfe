"""Kernel calls recorded once and run again as one, as CUDA graphs do.

A recorded call has fixed addresses: of weights and caches, which stay where they are, of inputs,
which are filled anew before each replay, and of results, which live in a `Workspace`.
"""

import ctypes
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from struct import Struct
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.native.huge_pages import region

ALIGNMENT = 64
CHUNK_BYTES = 2**22


class Workspace:
    """Memory for results, which is kept for the next ones: those of a pass, or all large ones.

    A result's bytes are free again once no tensor shows them, so that a pass takes no more than
    lives at once: its later layers write where the earlier ones have.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []
        # Results that died, which may be at any time and in any thread: (pass, run).
        self._dead: deque[tuple[int, tuple[int, int, int]]] = deque()
        self._lock = threading.Lock()
        self._pass = 0

    def reset(self) -> None:
        """Frees all memory, before each recorded pass."""
        self._pass += 1
        self._free = [(chunk, 0, len(memory)) for chunk, memory in enumerate(self._chunks)]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = max(1, prod(shape)) * dtype.itemsize
        room = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            chunk, start = self._reserve(room)
        bytes_ = self._chunks[chunk][start : start + size]
        # The tensor's memory holds this view of the chunk, and lets go of it at its end.
        died = (self._pass, (chunk, start, start + room))
        finalize(bytes_, self._dead.append, died).atexit = False
        return torch.from_numpy(bytes_).view(dtype)[: prod(shape)].view(shape)

    def _reserve(self, room: int) -> tuple[int, int]:
        """The chunk and the place in it of `room` bytes."""
        self._collect()
        found = next((run for run in self._free if run[2] - run[1] >= room), None)
        if found is None:
            # A power of two: of passes that grow bit by bit, few leave a chunk that is too small.
            self._chunks.append(region(max(self._chunk_bytes, 1 << (room - 1).bit_length())))
            found = (len(self._chunks) - 1, 0, len(self._chunks[-1]))
        else:
            self._free.remove(found)
        chunk, start, end = found
        if end - start > room:
            insort(self._free, (chunk, start + room, end))
        return chunk, start

    def _collect(self) -> None:
        """Puts what died among the free runs, as one with its neighbours."""
        while self._dead:
            of_pass, run = self._dead.popleft()
            if of_pass == self._pass:  # of a recording that is over it was free long ago
                insort(self._free, run)
        merged: list[tuple[int, int, int]] = []
        for chunk, start, end in self._free:
            if merged and merged[-1][0] == chunk and merged[-1][2] == start:
                start = merged.pop()[1]
            merged.append((chunk, start, end))
        self._free = merged


class Recording:
    """The calls of one pass, (address of the kernel, its fields) each."""

    _CALL = Struct("2q")

    def __init__(self, calls: Sequence[tuple[int, bytes]], run: Callable[[bytes], None]) -> None:
        self._run = run
        self._fields = [ctypes.create_string_buffer(fields, len(fields)) for _, fields in calls]
        addresses = zip((kernel for kernel, _ in calls), self._fields, strict=True)
        packed = b"".join(
            self._CALL.pack(kernel, ctypes.addressof(fields)) for kernel, fields in addresses
        )
        self._calls = ctypes.create_string_buffer(packed, len(packed))
        self._replay = self._CALL.pack(ctypes.addressof(self._calls), len(calls))

    def replay(self) -> None:
        """Runs all kernels in their order, with the GIL released once."""
        self._run(self._replay)


class TorchWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch computes while it is on: `names` of operators, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler at the first operator, for more than a second; nothing
        # is compiled here. A torch without this switch ignores it.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
