"""The gated delta rule on states where they lie, by the native kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.forward import StateIndex
from engine.native.kernels import Kernels
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.state_pool import segment_parts


class NativeDeltaRule:
    """See `backend.GatedDeltaRule`; q, k, v, a and b have the kernels' dtype.

    Segments move by groups of four tokens: a cut after a whole group changes no bit.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._step = kernels.delta_step
        self._segment = kernels.delta_segment
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        pool: Tensor,
        index: StateIndex,
        *,
        parameters: DeltaRuleParameters,
    ) -> Tensor:
        rows = (q, k, v, a, b)
        o = self._empty(tuple(v.shape), torch.float32)
        decodes = index.lens.num_decodes
        if decodes:
            fields = self._fields(rows, parameters, o)
            units = index.units.data_ptr()
            self._step(*fields, pool.data_ptr(), pool.stride(0), units, decodes)
        start = decodes
        for count, source, target in segment_parts(pool, index):
            part = slice(start, start + count)
            fields = self._fields([row[part] for row in rows], parameters, o[part])
            self._segment(*fields, count, source.data_ptr(), target.data_ptr())
            start += count
        return o

    def _fields(
        self, rows: Sequence[Tensor], parameters: DeltaRuleParameters, o: Tensor
    ) -> tuple[float, ...]:
        _, k, v, _, _ = rows
        (key_heads, dk), (heads, dv) = k.shape[1:], v.shape[1:]
        bias = parameters.dt_bias
        return (
            *(field for row in rows for field in (row.data_ptr(), row.stride(0))),
            *(key_heads, heads, dk, dv, bias.numel() // heads),
            *(parameters.rate.data_ptr(), bias.data_ptr(), parameters.beta_scale),
            *(o.data_ptr(), self._threads),
        )
