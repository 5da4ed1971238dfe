"""Tables of byte ranges for kernels: cut into parts on the host, copied to the device at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers = npt.NDArray[np.int64]


class Parts(NamedTuple):
    """Parts of ranges, in order: the range `of` each, its `start` in that range, its `length`."""

    of: Numbers
    start: Numbers
    length: Numbers


def in_parts(lengths: Numbers, size: int, *, joins_rest: bool) -> Parts:
    """Ranges of `lengths` [N] cut every `size`; the rest is a part, or joins the last one.

    With `size` 4, of a range of 10:   | 4 | 4 | 2 |   or, joined,   | 4 |  6   |
    """
    counts = np.maximum(lengths // size if joins_rest else -(-lengths // size), 1)
    of = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * size
    is_last = number == counts[of] - 1
    return Parts(of, start, np.where(is_last, lengths[of] - start, size))


def on_device(rows: Sequence[Numbers], device: torch.device) -> Tensor:
    """`rows` as int64 [rows, N] on the device; queued on the current stream."""
    table = torch.from_numpy(np.stack(rows))
    if device.type == "cpu":
        return table
    # Out of page-locked memory a copy need not be waited for; torch keeps it until it has ended.
    return table.pin_memory().to(device, non_blocking=True)
