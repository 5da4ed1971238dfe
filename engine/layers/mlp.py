"""The gated feed-forward block: down(act(gate(x)) * up(x)), gate and up in one product."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import load_linear, per_output
from engine.layers.mixer import ForwardPass
from engine.layers.weights import Weights
from engine.model_configs.model_config import MLPConfig


class GatedMLP:
    """Tensors `{gate_proj,up_proj,down_proj}.{weight,bias}`.

    `gate_up`: the stored matrices that hold gate and then up; `down`: the last one's name.
    """

    def __init__(
        self,
        config: MLPConfig,
        weights: Weights,
        hidden: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> None:
        self.activation = activation
        inner = config.intermediate_size
        self.gate_up = load_linear(
            weights,
            {name: 2 * inner // len(gate_up) for name in gate_up},
            inputs=hidden,
            bias=config.bias,
            output_scale=per_output([(config.gate_scale, inner), (1.0, inner)], weights.device),
        )
        self.down = load_linear(
            weights,
            {down: hidden},
            inputs=inner,
            bias=config.bias,
            output_scale=config.output_scale,
        )

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up), residual)
