"""Matrix products by one packed copy of each matrix, which serves one row and thousands."""

import torch
from torch import Tensor

from engine.native.kernels import Kernel, Kernels, pointer

LANES = 16
"""Outputs of one panel."""
WIDTH = 4 * LANES
"""Outputs that are computed together; a matrix is filled up with rows of zeros."""
WORD = 4
"""Bytes that a kernel takes of a row at a time."""
INT8_GROUP = 64
"""Inputs of an int8 matrix with one scale."""
SCALE = 4
"""Bytes of a scale."""


class _Panels:
    """A packed matrix and the kernel that multiplies by it; `words`: a row's, as it counts them."""

    def __init__(
        self,
        kernels: Kernels,
        panels: Tensor,
        bias: Tensor | None,
        *,
        run: Kernel,
        outputs: int,
        words: int,
    ) -> None:
        self._panels = panels
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(len(panels))
            self._bias[:outputs] = bias
        self._fixed = (pointer(panels), pointer(self._bias), outputs, words)
        self._outputs = outputs
        self._run = run
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        added = None if residual is None else residual.contiguous()
        rows = x.shape[0]
        y = self._empty((rows, self._outputs), x.dtype)
        self._run(*self._fixed, x.data_ptr(), rows, pointer(added), y.data_ptr(), self._threads)
        return y


class NativeLinear(_Panels):
    """See `backend.Product`; weight [out, in] and bias [out] or None, of the kernels' dtype."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        panels = kernels.huge_pages.take((padded(outputs), inputs), weight.dtype)
        words = inputs * weight.dtype.itemsize // WORD
        weight = weight.contiguous()
        kernels.pack(pointer(weight), outputs, words, pointer(panels))
        super().__init__(kernels, panels, bias, run=kernels.linear, outputs=outputs, words=words)


class NativeInt8Linear(_Panels):
    """As `NativeLinear`, computed as `naive.linear_int8` says; a number takes 8.5 bits.

    A row's result is the same, bit by bit, in a batch of any size.
    """

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        group = INT8_GROUP + SCALE
        shape = (padded(outputs), -(-inputs // INT8_GROUP) * group)
        panels = kernels.huge_pages.take(shape, torch.int8)
        weight = weight.contiguous()
        kernels.pack_int8(pointer(weight), outputs, inputs, pointer(panels), kernels.threads)
        run = kernels.linear_int8
        super().__init__(kernels, panels, bias, run=run, outputs=outputs, words=inputs)


def padded(outputs: int) -> int:
    """Rows of a packed matrix: whole tiles."""
    return -(-outputs // WIDTH) * WIDTH


def is_suited(weight: Tensor) -> bool:
    """True if rows are whole words, as those of every published model are."""
    return weight.shape[1] * weight.dtype.itemsize % WORD == 0
