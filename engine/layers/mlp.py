"""The gated feed-forward block: down(act(gate(x)) * up(x)), gate and up in one product."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.layers.projection import load_linear, per_output
from engine.layers.weights import Weights


@dataclass(slots=True, frozen=True, kw_only=True)
class MLPStyle:
    """In what a family's block differs from the common one.

    `bias` is for all projections; `gate_scale` multiplies gate(x), `output_scale` the result.
    `gate_up`: the stored matrices that hold gate and then up; `down`: the last one's name.
    """

    activation: Callable[[Tensor], Tensor] = F.silu
    bias: bool = False
    gate_scale: float = 1.0
    output_scale: float = 1.0
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


COMMON = MLPStyle()


class GatedMLP:
    """Tensors `<prefix>.{gate_proj,up_proj,down_proj}.weight`, or as `style` says."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden: int,
        intermediate: int,
        *,
        style: MLPStyle = COMMON,
    ) -> None:
        self.activation = style.activation
        runs = [(style.gate_scale, intermediate), (1.0, intermediate)]
        self.gate_up = load_linear(
            weights,
            prefix,
            {name: 2 * intermediate // len(style.gate_up) for name in style.gate_up},
            inputs=hidden,
            bias=style.bias,
            output_scale=1.0 if style.gate_scale == 1.0 else per_output(runs, weights.device),
        )
        self.down = load_linear(
            weights,
            prefix,
            {style.down: hidden},
            inputs=intermediate,
            bias=style.bias,
            output_scale=style.output_scale,
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + mlp(x), both [T, hidden]."""
        return self.down.add_to(residual, self._inner(x))

    def alone(self, x: Tensor) -> Tensor:
        """mlp(x), [T, hidden]."""
        return self.down(self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.activation(gate).mul_(up)
