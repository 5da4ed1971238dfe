"""Norms with a gate by torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_configs.recurrent import Gating
from engine.ops.norm.fast import TorchNorm


class TorchGatedNorm:
    """See `backend.MakeGatedNorm`. Overwrites y."""

    def __init__(self, weight: Tensor | None, eps: float, *, gating: Gating) -> None:
        self._gating = gating
        self._norm: TorchNorm | None = None
        if weight is not None:
            self._norm = TorchNorm(weight, eps, torch.float32)
            self._size = weight.shape[-1]

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        wide, shape = gate.float(), gate.shape
        y = y.reshape(shape)
        factor = wide.sigmoid() if self._gating is Gating.NORM_THEN_SIGMOID else F.silu(wide)
        if self._norm is None:
            return y.mul_(factor).to(gate.dtype)
        if self._gating is Gating.GATE_THEN_NORM:
            y = y.mul_(factor)
        y = self._norm(y.view(shape[0], -1, self._size)).view(shape)
        return (y if self._gating is Gating.GATE_THEN_NORM else y.mul_(factor)).to(gate.dtype)
