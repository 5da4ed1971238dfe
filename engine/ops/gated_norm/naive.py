"""A norm and a gate, as they are written."""

from torch import Tensor

from engine.model_configs.recurrent import Gating
from engine.ops.norm.naive import norm


def gated_norm(
    y: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, gating: Gating
) -> Tensor:
    """See `engine.ops.backend.MakeGatedNorm`: float32 y [T, ...] and gate [T, C] -> [T, C]."""
    y, wide = y.reshape(gate.shape), gate.float()
    factor = wide.sigmoid() if gating is Gating.NORM_THEN_SIGMOID else wide * wide.sigmoid()
    if gating is Gating.GATE_THEN_NORM:
        y = y * factor
    if weight is not None:
        groups = y.view(len(y), -1, weight.shape[-1])
        y = norm(groups, weight, eps, y.dtype).view(gate.shape)
    return (y if gating is Gating.GATE_THEN_NORM else y * factor).to(gate.dtype)
