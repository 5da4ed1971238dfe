"""Rotary embedding by torch."""

import torch
from torch import Tensor


def rotate_(x: Tensor, rotary: Tensor) -> None:
    """See `engine.ops.backend.Rotate`."""
    cos, sin = rotary.unbind()
    dim = cos.shape[-1]
    head = x[..., :dim]
    turned = head.to(cos.dtype)
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); the table has the sign of sin.
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    turned.mul_(cos).addcmul_(swapped, sin)
    if turned is not head:
        head.copy_(turned)
