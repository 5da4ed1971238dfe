"""An MLP: down(act(gate(x)) * up(x)), with gate and up in one product; or without the gate."""

from torch import Tensor

from engine.layers.linear import load_linear, per_output
from engine.layers.mixer import ForwardPass
from engine.model_configs.feed_forward import MLPConfig
from engine.model_configs.model_config import ModelConfig
from engine.ops.backend import Product
from engine.weights.weights import Weights


class MLP:
    """Tensors `{gate_proj,up_proj,down_proj}.{weight,bias}`; gate and up may be `gate_up_proj`.

    A gate of tokens is `token_gate.weight` [1, hidden].
    """

    def __init__(self, config: MLPConfig, weights: Weights, model: ModelConfig) -> None:
        self.activation = weights.ops.activation(config.activation, gated=config.gated)
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
        self.gate = weights.ops.gate
        self.token_gate: Product | None = None
        if config.token_gate:
            self.token_gate = load_linear(weights, {"token_gate": 1}, inputs=hidden)

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        inner = self.activation(self.up(x))
        if self.token_gate is None:
            return self.down(inner, residual)
        return self.gate(self.down(inner), self.token_gate(x), residual)
