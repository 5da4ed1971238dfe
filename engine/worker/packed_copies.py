"""Several arrays between host and device in one copy, for which nobody waits before it is needed.

A copy costs the host some microseconds, whatever its size; a pageable one makes it wait for all
that the device has to do.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 8
"""Bytes: where each array begins, so that it can be viewed as its own type."""

_DTYPES = {"int64": torch.int64, "float64": torch.float64, "uint8": torch.uint8}


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays, of int64, float64 or uint8, as tensors on `device`, in one copy."""
    ends, end = [], 0
    for array in arrays:
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        ends.append(end)
    # Torch keeps pinned memory until the copy has read it.
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    starts = [0, *ends]
    for start, array in zip(starts, arrays, strict=False):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed[start : start + array.nbytes].copy_(torch.from_numpy(flat))
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


class CopyToHost:
    """Tensors of one device on their way to the host; the first have the widest elements."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = [(one.dtype, tuple(one.shape)) for one in tensors]
        self._packed = torch.cat([one.reshape(-1).view(torch.uint8) for one in tensors])
        self._event = None
        if self._packed.is_cuda:
            there = self._packed
            self._packed = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
            self._packed.copy_(there, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(there.device))

    def arrays(self) -> list[NDArray[Any]]:
        """Waits for the copy alone, and not for what the device was given after it."""
        if self._event is not None:
            self._event.synchronize()
        here, found, start = self._packed.cpu(), [], 0
        for dtype, shape in self._parts:
            end = start + prod(shape) * dtype.itemsize
            found.append(here[start:end].view(dtype).view(shape).numpy())
            start = end
        return found
