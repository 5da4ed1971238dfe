"""The gated delta rule: decode steps on states where they lie, by the native kernels."""

import torch
from torch import Tensor

from engine.forward import StateIndex
from engine.native.kernels import Kernels
from engine.ops.gated_delta_rule import fast
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters


class NativeDeltaRule:
    """See `backend.GatedDeltaRule`; q, k, v, a and b have the kernels' dtype.

    Prefill segments are torch's, in chunks.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._step = kernels.delta_step
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
        decodes = index.lens.num_decodes
        tail = None
        if decodes < q.shape[0]:
            tail = fast.segments(q, k, v, a, b, pool, index, parameters=parameters)
            if not decodes:
                return tail
        heads, dv = v.shape[1:]
        o = self._empty((decodes, heads, dv), torch.float32)
        bias = parameters.dt_bias
        self._step(
            *(field for row in (q, k, v, a, b) for field in (row.data_ptr(), row.stride(0))),
            *(k.shape[1], heads, k.shape[2], dv, bias.numel() // heads),
            *(parameters.rate.data_ptr(), bias.data_ptr(), parameters.beta_scale),
            *(pool.data_ptr(), pool.stride(0), index.units.data_ptr(), decodes),
            *(o.data_ptr(), self._threads),
        )
        return o if tail is None else torch.cat([o, tail])
