"""State space duality on states where they lie, by the native kernels."""

import torch
from torch import Tensor

from engine.forward import StateIndex
from engine.native.kernels import Kernels, pointer
from engine.ops.ssd import fast
from engine.ops.ssd.parameters import SSDParameters
from engine.ops.state_pool import segment_parts


class NativeSSD:
    """See `backend.StateSpaceDuality`; x, dt, b and c have the kernels' dtype.

    States that are kept in another dtype than float32 move by torch.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._step = kernels.ssd_step
        self._segment = kernels.ssd_segment
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(
        self,
        x: Tensor,
        dt: Tensor | None,
        b: Tensor,
        c: Tensor,
        pool: Tensor,
        index: StateIndex,
        *,
        parameters: SSDParameters,
    ) -> Tensor:
        if pool.dtype is not torch.float32:
            return fast.ssd(x, dt, b, c, pool, index, parameters=parameters)
        y = self._empty(tuple(x.shape), torch.float32)
        decodes = index.lens.num_decodes
        if decodes:
            fields = self._fields(x, dt, b, c, parameters, y)
            units = index.units.data_ptr()
            self._step(*fields, pool.data_ptr(), pool.stride(0), units, decodes)
        start = decodes
        for rows, source, target in segment_parts(pool, index):
            part = slice(start, start + rows)
            of_dt = None if dt is None else dt[part]
            fields = self._fields(x[part], of_dt, b[part], c[part], parameters, y[part])
            self._segment(*fields, rows, source.data_ptr(), target.data_ptr())
            start += rows
        return y

    def _fields(
        self,
        x: Tensor,
        dt: Tensor | None,
        b: Tensor,
        c: Tensor,
        parameters: SSDParameters,
        y: Tensor,
    ) -> tuple[float, ...]:
        heads, dim = x.shape[1:]
        steps = (0, 0) if dt is None else (dt.data_ptr(), dt.stride(0))
        return (
            *(x.data_ptr(), x.stride(0), *steps),
            *(b.data_ptr(), b.stride(0), c.data_ptr(), c.stride(0)),
            *(heads, dim, *b.shape[1:]),
            *(parameters.a.data_ptr(), pointer(parameters.dt_bias), *parameters.limits),
            *(pointer(parameters.d), y.data_ptr(), self._threads),
        )
