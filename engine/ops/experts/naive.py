"""A mixture of experts, one token and one expert at a time: the truth for `fast.py`."""

import torch
from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.ops.activation import naive


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    gated: bool,
) -> Tensor:
    """See `engine.ops.backend.Mixture`; in float32, without a residual."""
    x, up, down = x.float(), up.float(), down.float()
    rows = []
    for row, own, weights in zip(x, chosen.tolist(), shares, strict=True):
        total = torch.zeros_like(row)
        for expert, share in zip(own, weights, strict=True):
            inner = naive.activation((up[expert] @ row).unsqueeze(0), activation, gated=gated)
            total += share * (down[expert] @ inner[0])
        rows.append(total)
    return torch.stack(rows)
