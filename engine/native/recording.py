"""Kernel calls recorded once and run again as one, as CUDA graphs do.

A recorded call has fixed addresses: of weights and caches, which stay where they are, of inputs,
which are filled anew before each replay, and of results, which live in a `Workspace`.
"""

import ctypes
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

ALIGNMENT = 64
CHUNK_BYTES = 2**22


class Workspace:
    """Memory for the results of recorded passes: they run one at a time, and so share it.

    A result's bytes are free again once no tensor shows them, so that a pass takes no more than
    lives at once: its later layers write where the earlier ones have.
    """

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []
        self._pass = 0

    def reset(self) -> None:
        """Frees all memory, before each recorded pass."""
        self._pass += 1
        self._free = [(chunk, 0, len(memory)) for chunk, memory in enumerate(self._chunks)]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = max(1, prod(shape)) * dtype.itemsize
        room = -(-size // ALIGNMENT) * ALIGNMENT
        found = next((run for run in self._free if run[2] - run[1] >= room), None)
        if found is None:
            self._chunks.append(_aligned(max(CHUNK_BYTES, room)))
            found = (len(self._chunks) - 1, 0, len(self._chunks[-1]))
        else:
            self._free.remove(found)
        chunk, start, end = found
        if end - start > room:
            self._free.append((chunk, start + room, end))
            self._free.sort()
        bytes_ = self._chunks[chunk][start : start + size]
        # The tensor's memory holds this view of the chunk, and lets go of it at its end.
        finalize(bytes_, self._give_back, self._pass, (chunk, start, start + room)).atexit = False
        return torch.from_numpy(bytes_).view(dtype)[: prod(shape)].view(shape)

    def _give_back(self, of_pass: int, run: tuple[int, int, int]) -> None:
        if of_pass != self._pass:
            return  # of a recording that is over: its memory was free long ago
        merged: list[tuple[int, int, int]] = []
        for chunk, start, end in sorted([*self._free, run]):
            if merged and merged[-1][0] == chunk and merged[-1][2] == start:
                start = merged.pop()[1]
            merged.append((chunk, start, end))
        self._free = merged


def _aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


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
