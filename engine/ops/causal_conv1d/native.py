"""Depthwise causal convolution on states where they lie, by the native kernels."""

from torch import Tensor

from engine.forward import StateIndex
from engine.native.kernels import Kernels, pointer


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
        if decodes < tokens:
            self._segments(x, pool, index, taps, y)
        return y

    def _segments(
        self, x: Tensor, pool: Tensor, index: StateIndex, taps: tuple[int, ...], y: Tensor
    ) -> None:
        decodes = index.lens.num_decodes
        kept, channels = pool.shape[1:]
        units = index.units[decodes:].tolist()
        start = decodes
        for segment, length in enumerate(index.lens.query_lens[decodes:]):
            rows, own = (x[start:].data_ptr(), x.stride(0)), pool[units[segment]].data_ptr()
            self._segment(*taps, *rows, length, own, y[start:].data_ptr())
            # Exports first: they read the state that the last one is written over.
            after = [(one.offset, one.unit) for one in index.exports if one.segment == segment]
            for offset, unit in [*after, (length, units[segment])]:
                to = pool[unit].data_ptr()
                self._state(*rows, offset, own, kept, channels, to)
            start += length
