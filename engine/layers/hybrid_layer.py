"""A whole layer of hybrid models: mixers, then feed-forward blocks, each pair on its own norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.layers.mixers import ForwardPass, Mixer
from engine.layers.norm import RMSNorm


class FeedForward(Protocol):
    """residual + block(x), both [T, hidden]."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class HybridLayer:
    """x + all mixers(norm(x)), then x + all feed-forward blocks(mlp_norm(x)).

    Mixers are in parallel: they read the same input and add to the same residual. So do blocks.
    """

    norm: RMSNorm
    mixers: Sequence[Mixer]
    mlp_norm: RMSNorm
    blocks: Sequence[FeedForward]

    def __call__(self, x: Tensor, step: ForwardPass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        normed = self.norm(x)
        for mixer in self.mixers:
            x = mixer(normed, x, step)
        normed = self.mlp_norm(x)
        for block in self.blocks:
            x = block(normed, x)
        return x
