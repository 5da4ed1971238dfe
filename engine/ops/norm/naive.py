"""A root-mean-square norm, as it is written."""

import torch
from torch import Tensor


def norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """x [..., D], weight [..., D], residual like x -> like x, of `dtype`, computed in float32."""
    wide = x.float()
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()
    return (y if residual is None else y + residual.float()).to(dtype)
