"""Rotary position embedding on the leading channels of each head: i pairs with i + half.

The table of cosines and sines grows on demand; it does not know the model's longest position.
"""

from math import ceil, floor, log, pi
from operator import add

import torch
from torch import Tensor

from engine.forward import ForwardBatch
from engine.model_configs.rope import (
    ChannelScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)
from engine.ops.backend import Ops

FIRST_TABLE = 1024


class Rotary:
    """Cosines and sines of all positions met so far: [positions, 2, rotary_dim], from float32."""

    def __init__(
        self, rope: RopeConfig, dtype: torch.dtype, device: torch.device, *, ops: Ops
    ) -> None:
        self.rope = rope
        self.dtype = torch.float32 if rope.wide else dtype
        self.device = device
        self._lookup = ops.lookup
        self._tables = [self._build(FIRST_TABLE)]

    def select(self, batch: ForwardBatch) -> Tensor:
        """[2, T, 1, rotary_dim] of the batch: cosines, and sines with the first half negated."""
        needed = max(map(add, batch.lens.context_lens, batch.lens.query_lens))
        if needed > self._tables[-1].shape[0]:
            # Twice as long, so that a growing sequence rebuilds it a few times only. The shorter
            # ones stay: recorded passes read them where they lie.
            self._tables.append(self._build(2 * needed))
        rows = self._lookup(self._tables[-1], batch.positions, self.dtype)
        return rows.transpose(0, 1).unsqueeze(2)

    def _build(self, positions: int) -> Tensor:
        inverse = frequencies(self.rope, self.device)
        angles = torch.outer(torch.arange(positions, device=self.device).float(), inverse)
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        return table.mul_(self.rope.magnitude).to(self.dtype)


def frequencies(rope: RopeConfig, device: torch.device) -> Tensor:
    """float32 [rotary_dim / 2]: radians per position of each pair of channels.

    In the order of operations of transformers' modeling_rope_utils.py: a rounding of the last bit
    is a hundredth of a radian after 100,000 positions.
    """
    dim = rope.rotary_dim
    steps = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float()
    periods = rope.theta ** (steps / dim)
    match rope.scaling:
        case None:
            return 1.0 / periods
        case LinearScaling(factor):
            return 1.0 / periods / factor
        case ChannelScaling(factors):
            return 1.0 / (torch.tensor(factors, device=device) * periods)
        case YarnScaling() as yarn:
            kept = 1.0 - _yarn_ramp(rope, yarn, device)
            return 1.0 / (yarn.factor * periods) * (1.0 - kept) + 1.0 / periods * kept
        case Llama3Scaling() as llama:
            return _llama3(1.0 / periods, llama)


def _yarn_ramp(rope: RopeConfig, yarn: YarnScaling, device: torch.device) -> Tensor:
    """float32 [rotary_dim / 2]: 0 for frequencies that are kept, 1 for those that are divided."""

    def channel(rotations: float) -> float:
        """The channel that rotates so often in the original context."""
        turn = yarn.original_positions / (rotations * 2 * pi)
        return rope.rotary_dim * log(turn) / (2 * log(rope.theta))

    first, last = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    # A ramp of no length is a step.
    width = last - first or 0.001
    channels = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device=device)
    return ((channels - first) / width).clamp_(0.0, 1.0)


def _llama3(plain: Tensor, llama: Llama3Scaling) -> Tensor:
    rotations = llama.original_positions / (2 * pi / plain)
    kept = ((rotations - llama.low) / (llama.high - llama.low)).clamp_(0.0, 1.0)
    return (1.0 - kept) * plain / llama.factor + kept * plain
