"""Root-mean-square norms. Weights that a family stores minus one are corrected at load.

Written as x / hypot(|x|, c): three or four small kernels, where torch's CPU rms_norm dispatches
about eight.
"""

import torch
from torch import Tensor

from engine.model_configs.model_config import ModelConfig
from engine.weights.weights import Weights


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension D of x; weight [..., D].

    Computed in float32, whatever x is; the result has the dtype `dtype`.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self._dtype = dtype
        # x / sqrt(|x|^2 / D + eps) = x sqrt(D) / hypot(|x|, sqrt(D eps))
        self._scaled = weight.float() * size**0.5
        self._floor = torch.full((1,), (size * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape."""
        wide = x.float()
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        length.hypot_(self._floor)
        return wide.div(length).mul_(self._scaled).to(self._dtype)


def load_norm(weights: Weights, name: str, model: ModelConfig) -> RMSNorm:
    """The norm `<name>.weight` over the hidden channels."""
    weight = weights.take(f"{name}.weight", (model.hidden_size,)).float() + model.norm_offset
    return RMSNorm(weight, model.rms_norm_eps, weights.dtype)
