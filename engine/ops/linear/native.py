"""Matrix products by one packed copy of each matrix, which serves one row and thousands."""

import torch
from torch import Tensor

from engine.native.kernels import Kernels, pointer

PANEL = 32
"""Outputs that are computed together; a matrix is filled up with rows of zeros."""
WORD = 4
"""Bytes that a kernel takes of a row at a time."""


class NativeLinear:
    """See `backend.Product`; weight [out, in] and bias [out] or None, of the kernels' dtype."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        words = inputs * weight.dtype.itemsize // WORD
        padded = -(-outputs // PANEL) * PANEL
        self._outputs = outputs
        self._panels = torch.empty((padded, inputs), dtype=weight.dtype)
        weight = weight.contiguous()
        kernels.pack(pointer(weight), outputs, words, pointer(self._panels))
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(padded)
            self._bias[:outputs] = bias
        self._fixed = (pointer(self._panels), pointer(self._bias), outputs, words)
        self._run = kernels.linear
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        added = 0 if residual is None else residual.contiguous().data_ptr()
        rows = x.shape[0]
        y = self._empty((rows, self._outputs), x.dtype)
        self._run(*self._fixed, x.data_ptr(), rows, added, y.data_ptr(), self._threads)
        return y


def is_suited(weight: Tensor) -> bool:
    """Its rows are whole words: every published model's are."""
    return weight.shape[1] * weight.dtype.itemsize % WORD == 0
