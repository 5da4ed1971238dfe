"""Depthwise causal convolution on states where they lie, by the native kernels."""

from torch import Tensor

from engine.forward import StateIndex
from engine.native.kernels import Kernels, pointer
from engine.ops.state_pool import segment_parts


class NativeConv:
    """See `backend.CausalConv1d`; all tensors have the kernels' dtype."""

    def __init__(self, kernels: Kernels) -> None:
        self._step = kernels.conv_step
        self._segment = kernels.conv_segment
        self._state = kernels.conv_state
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(
        self,
        x: Tensor,
        pool: Tensor,
        index: StateIndex,
        weight: Tensor,
        bias: Tensor | None,
        *,
        silu: bool = True,
    ) -> Tensor:
        tokens, channels = x.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        y = self._empty((tokens, channels), x.dtype)
        taps = (weight.data_ptr(), pointer(bias), len(weight), channels, silu, self._threads)
        decodes = index.lens.num_decodes
        if decodes:
            states = (pool.data_ptr(), pool.stride(0), index.units.data_ptr())
            self._step(*taps, x.data_ptr(), x.stride(0), *states, decodes, y.data_ptr())
        start = decodes
        for rows, source, target in segment_parts(pool, index):
            first, before = (x[start:].data_ptr(), x.stride(0), rows), source.data_ptr()
            self._segment(*taps, *first, before, y[start:].data_ptr())
            self._state(*first, before, pool.shape[1], channels, target.data_ptr())
            start += rows
        return y
