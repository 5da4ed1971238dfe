"""Norms with a gate in one pass over a row."""

from torch import Tensor

from engine.model_configs.recurrent import Gating
from engine.native.kernels import Kernels, pointer

NUMBERS = {gating: number for number, gating in enumerate(Gating)}
"""Of `enum Gating` in norms.h."""


class NativeGatedNorm:
    """See `backend.MakeGatedNorm`; the gate has the kernels' dtype."""

    def __init__(
        self, kernels: Kernels, weight: Tensor | None, eps: float, *, gating: Gating
    ) -> None:
        self._weight = None if weight is None else weight.float().contiguous()
        self._size = None if weight is None else weight.shape[-1]
        by_group = weight is not None and weight.dim() == 2
        stride = self._size if by_group and self._size is not None else 0
        self._fixed = (pointer(self._weight), stride, eps, NUMBERS[gating])
        self._run = kernels.gated_norm
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        if gate.stride(1) != 1:
            gate = gate.contiguous()
        y = y.contiguous()
        rows, channels = shape = gate.shape
        size = self._size or channels
        result = self._empty(shape, gate.dtype)
        self._run(
            *self._fixed,
            y.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            rows,
            channels // size,
            size,
            result.data_ptr(),
            self._threads,
        )
        return result
