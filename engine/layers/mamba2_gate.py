"""How a Mamba2 mixer's output is gated and normalised, which differs between families."""

import torch.nn.functional as F
from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.layers.weights import Weights
from engine.model_configs.mamba2 import Gating, Mamba2Config


class OutputGate:
    """`<prefix>.norm.weight` [inner], normalised by groups of channels; none for GATE_ONLY."""

    def __init__(self, config: Mamba2Config, weights: Weights, prefix: str, *, eps: float) -> None:
        self.gating = config.gating
        self.shape = (config.n_groups, config.inner_size // config.n_groups)
        self.norm = None
        if config.gating is not Gating.GATE_ONLY:
            weight = weights.take(f"{prefix}.norm.weight", (config.inner_size,))
            self.norm = RMSNorm(weight.view(self.shape), eps)

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """y float32 [T, heads, head_dim] (overwritten), z [T, inner] -> float32 [T, inner]."""
        y, gate = y.view(z.shape), F.silu(z.float())
        if self.norm is None:
            return y.mul_(gate)
        if self.gating is Gating.NORM_THEN_GATE:
            return self.norm(y.view(-1, *self.shape)).view(z.shape).mul_(gate)
        return self.norm(y.mul_(gate).view(-1, *self.shape)).view(z.shape)
