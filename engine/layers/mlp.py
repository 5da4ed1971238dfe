"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one product."""

import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.weights import Weights


class GatedMLP:
    """Tensors `<prefix>.{gate_proj,up_proj,down_proj}.weight`."""

    def __init__(self, weights: Weights, prefix: str, hidden: int, intermediate: int) -> None:
        gate_up = [
            weights.take(f"{prefix}.{name}.weight", (intermediate, hidden))
            for name in ("gate_proj", "up_proj")
        ]
        self.gate_up = Linear.merged(gate_up)
        self.down = Linear(weights.take(f"{prefix}.down_proj.weight", (hidden, intermediate)))

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + mlp(x), both [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down.add_to(residual, F.silu(gate).mul_(up))
