"""The function between the products of an MLP, and its gate, in one pass."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.native.kernels import Kernels

FUNCTIONS: Mapping[Activation, int] = MappingProxyType(
    {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.RELU2: 2}
)
"""Of `enum Function` in elementwise.h."""


class NativeActivation:
    """See `backend.MakeActivation`; x has the kernels' dtype."""

    def __init__(self, kernels: Kernels, kind: Activation, *, gated: bool) -> None:
        self._function = FUNCTIONS[kind]
        self._gated = gated
        self._run = kernels.gate
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, size = x.shape
        gate, stride, up = x.data_ptr(), x.stride(0), 0
        if self._gated:
            size //= 2
            up = gate + size * x.element_size()
        y = self._empty((rows, size), x.dtype)
        self._run(
            self._function,
            gate,
            stride,
            1,
            up,
            stride,
            0,
            rows,
            size,
            y.data_ptr(),
            self._threads,
        )
        return y
