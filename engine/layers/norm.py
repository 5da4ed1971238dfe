"""Root-mean-square norms. Weights that a family stores minus one are corrected at load.

Written as x / hypot(|x|, c): three or four small kernels, where torch's CPU rms_norm dispatches
about eight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.weights import Weights


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension D of x; weight [..., D]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._scaled = weight.float() * size**0.5
        self._floor = torch.full((1,), (size * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape and dtype; float32 inside."""
        wide = x.float()
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        length.hypot_(self._floor)
        return wide.div(length).mul_(self._scaled).to(x.dtype)


def load_norm(
    weights: Weights, name: str, size: int, *, eps: float, offset: float = 0.0
) -> RMSNorm:
    """The norm `<name>.weight` [size]; `offset` is added for families that store it minus one."""
    return RMSNorm(weights.take(f"{name}.weight", (size,)).float() + offset, eps)


class GatedRMSNorm:
    """rms_norm(x) * weight * silu(gate): gated delta net's order, not Mamba2's."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.norm = RMSNorm(weight, eps)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., D] -> [..., D] in gate's dtype; neither is changed."""
        return self.norm(x).mul_(F.silu(gate.float())).to(gate.dtype)
