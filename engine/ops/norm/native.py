"""Root-mean-square norms that read a row once and write it once."""

import torch
from torch import Tensor

from engine.native.kernels import Kernels, pointer


class NativeNorm:
    """See `backend.MakeNorm`; `dtype` and that of x are float32 or the kernels'."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight.float().contiguous()
        self._size = weight.shape[-1]
        self._dtype = dtype
        stride = self._size if weight.dim() == 2 else 0
        self._fixed = (pointer(self._weight), stride, self._size, eps)
        self._ends = (int(dtype == torch.float32), kernels.threads)
        self._run = kernels.norm
        self._empty = kernels.empty

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        shape, strides = x.shape, x.stride()
        groups = 1 if len(shape) == 2 else shape[1]
        if strides[-1] != 1 or (groups > 1 and strides[1] != self._size):
            x = x.contiguous()
            strides = x.stride()
        added = None if residual is None else residual.contiguous()
        y = self._empty(shape, self._dtype)
        is_float = x.dtype == torch.float32
        self._run(
            *self._fixed,
            x.data_ptr(),
            is_float,
            strides[0],
            shape[0],
            groups,
            pointer(added),
            y.data_ptr(),
            *self._ends,
        )
        return y
