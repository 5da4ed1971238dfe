"""Rotary embedding in one pass, in place."""

import torch
from torch import Tensor

from engine.native.kernels import Kernels
from engine.ops.rotary import fast


class NativeRotate:
    """See `backend.Rotate`; x has the kernels' dtype."""

    def __init__(self, kernels: Kernels) -> None:
        self._run = kernels.rotate
        self._threads = kernels.threads

    def __call__(self, x: Tensor, rotary: Tensor) -> None:
        rows, heads, size = x.shape
        stride, *inner = x.stride()
        if inner != [size, 1]:
            fast.rotate_(x, rotary)
            return
        cosines = rotary.data_ptr()
        self._run(
            x.data_ptr(),
            stride,
            rows,
            heads,
            size,
            rotary.shape[3] // 2,
            cosines,
            cosines + rotary.stride(0) * rotary.element_size(),
            rotary.dtype == torch.float32,
            rotary.stride(1),
            self._threads,
        )
