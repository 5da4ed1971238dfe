"""An MLP: down(act(gate(x)) * up(x)), with gate and up in one product; or without the gate."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import load_linear, per_output
from engine.layers.mixer import ForwardPass
from engine.layers.weights import Weights
from engine.model_configs.feed_forward import Activation, MLPConfig
from engine.model_configs.model_config import ModelConfig


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.SILU: F.silu,
        Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
        Activation.RELU2: _relu2,
    }
)


class MLP:
    """Tensors `{gate_proj,up_proj,down_proj}.{weight,bias}`; gate and up may be `gate_up_proj`."""

    def __init__(self, config: MLPConfig, weights: Weights, model: ModelConfig) -> None:
        self.is_gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        inner, hidden = config.intermediate_size, model.hidden_size
        sizes, scale = {"up_proj": inner}, per_output([(1.0, inner)], weights.device)
        if config.gated:
            merged = "gate_up_proj.weight" in weights
            sizes = {"gate_up_proj": 2 * inner} if merged else {"gate_proj": inner, **sizes}
            scale = per_output([(config.gate_scale, inner), (1.0, inner)], weights.device)
        self.up = load_linear(weights, sizes, inputs=hidden, bias=config.bias, output_scale=scale)
        self.down = load_linear(
            weights,
            {"down_proj": hidden},
            inputs=inner,
            bias=config.bias,
            output_scale=config.output_scale,
        )

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        up = self.up(x)
        if not self.is_gated:
            return self.down(self.activation(up), residual)
        gate, up = up.chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up), residual)
