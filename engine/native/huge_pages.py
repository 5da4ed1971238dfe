"""Memory in pages of 2 MiB, where the system gives them: for packed matrices, and for results.

A product of few rows reads four streams at once. In pages of 4 KiB each stream pays for a new
address every 64 loads: a row took 1.4 times as long (98M parameters in bfloat16, an EPYC).
"""

import mmap
from contextlib import suppress
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

REGION_BYTES = 64 * 2**20
"""Asked for at once; what no matrix fills is never touched, and so takes no memory."""
ALIGNMENT = 64


class HugePages:
    """Gives out one region after the other; a region goes with the last tensor in it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = prod(shape) * dtype.itemsize
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if room > len(self._region):
            self._region = torch.from_numpy(region(max(room, REGION_BYTES)))
        memory, self._region = self._region[:size], self._region[room:]
        return memory.view(dtype).view(shape)


def region(size: int) -> NDArray[np.uint8]:
    """Zeroed memory that is taken as it is touched; it goes with the last array that shows it."""
    # Private: the system's own setting for shared memory often forbids such pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without them: plain pages are as right
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
