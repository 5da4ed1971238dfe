"""One tensor times another, or its sigmoid, in one pass."""

from torch import Tensor

from engine.native.kernels import Kernels, pointer

SIGMOID, IDENTITY = 3, 4
"""Of `enum Function` in elementwise.h."""


class NativeGate:
    """See `backend.Gate`; all tensors have the kernels' dtype."""

    def __init__(self, kernels: Kernels) -> None:
        self._run = kernels.gate
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(
        self, x: Tensor, by: Tensor, residual: Tensor | None = None, *, sigmoid: bool = True
    ) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        if by.stride(1) != 1:
            by = by.contiguous()
        rows, size = shape = x.shape
        added = None if residual is None else residual.contiguous()
        y = self._empty(shape, x.dtype)
        self._run(
            SIGMOID if sigmoid else IDENTITY,
            by.data_ptr(),
            by.stride(0),
            by.shape[1] == size,  # else one number for all channels
            x.data_ptr(),
            x.stride(0),
            pointer(added),
            rows,
            size,
            y.data_ptr(),
            self._threads,
        )
        return y
