"""Rotary position embedding on the leading channels of each head: i pairs with i + half.

The table of cosines and sines grows on demand; it does not know the model's longest position.
"""

from operator import add

import torch
from torch import Tensor

from engine.forward import ForwardBatch
from engine.model_configs.rope import RopeConfig

FIRST_TABLE = 1024


class Rotary:
    """Cosines and sines of all positions met so far: [positions, 2, rotary_dim], from float32."""

    def __init__(self, rope: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.rope = rope
        self.dtype = torch.float32 if rope.wide else dtype
        self.device = device
        self._table = self._build(FIRST_TABLE)

    def select(self, batch: ForwardBatch) -> Tensor:
        """[2, T, 1, rotary_dim] of the batch: cosines, and sines with the first half negated."""
        needed = max(map(add, batch.lens.context_lens, batch.lens.query_lens))
        if needed > self._table.shape[0]:
            # Twice as long, so that a growing sequence rebuilds it a few times only.
            self._table = self._build(2 * needed)
        return self._table.index_select(0, batch.positions).transpose(0, 1).unsqueeze(2)

    def _build(self, positions: int) -> Tensor:
        dim = self.rope.rotary_dim
        steps = torch.arange(0, dim, 2, dtype=torch.int64, device=self.device).float()
        frequencies = 1.0 / self.rope.theta ** (steps / dim) / self.rope.factor
        angles = torch.outer(torch.arange(positions, device=self.device).float(), frequencies)
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        return table.to(self.dtype)


def rotate_(x: Tensor, rotary: Tensor) -> None:
    """Rotates x [T, H, D] IN PLACE by `Rotary.select`'s [2, T, 1, rotary_dim]."""
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
