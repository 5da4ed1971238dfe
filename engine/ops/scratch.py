"""Memory for large temporaries, reused from layer to layer and from step to step.

A fresh tensor of some megabytes costs its page faults every time: more than the copy into it.
"""

from math import prod

import torch
from torch import Tensor


class Scratch:
    """One growing buffer per name; contents are valid until the next `take` of that name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor of `shape` with the dtype and device of `like`."""
        key = (name, like.dtype, like.device)
        size = prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # A tensor born in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                buffer = torch.empty(size + size // 4, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)
