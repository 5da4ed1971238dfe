"""Root-mean-square norms by torch, written as x / hypot(|x|, c).

These are three or four small kernels, where torch's CPU rms_norm dispatches about eight.
"""

import torch
from torch import Tensor


class TorchNorm:
    """See `backend.MakeNorm`."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self._dtype = dtype
        # x / sqrt(|x|^2 / D + eps) = x sqrt(D) / hypot(|x|, sqrt(D eps))
        self._scaled = weight.float() * size**0.5
        self._floor = torch.full((1,), (size * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        wide = x.float()
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        length.hypot_(self._floor)
        y = wide.div(length).mul_(self._scaled).to(self._dtype)
        return y if residual is None else residual + y
