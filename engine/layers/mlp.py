"""Feed-forward parts of a layer: a gated MLP, and a sparse mixture of experts.

A gated MLP is down(act(gate(x)) * up(x)), with gate and up in one product. Of a mixture every token
goes through the few MLPs that a router picks: tokens are sorted by expert, so each expert that was
chosen does one product over its tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import Linear, load_linear, per_output, scaled
from engine.layers.mixer import ForwardPass
from engine.layers.weights import Weights
from engine.model_configs.model_config import ExpertsConfig, MLPConfig


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


class Experts:
    """Tensors `{router.layer,input_linear,output_linear}.weight`, the last two stacked.

    input_linear [experts, 2 * intermediate, hidden] gives gate and up. A token's weights are a
    softmax over the router's `top_k` largest logits.
    """

    def __init__(self, config: ExpertsConfig, weights: Weights, hidden: int) -> None:
        count, inner = config.count, config.intermediate_size
        self.top_k = config.top_k
        self.router = Linear(weights.take("router.layer.weight", (count, hidden)))
        gate_up = weights.take("input_linear.weight", (count, 2 * inner, hidden))
        self.gate_up = [Linear(matrix) for matrix in gate_up]
        down = weights.take("output_linear.weight", (count, hidden, inner))
        self.down = [Linear(matrix) for matrix in scaled(down, config.output_scale)]

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        """Sums over experts, and with the residual, are float32."""
        # The host must know each expert's rows: the one synchronising copy in a forward pass.
        logits, chosen = self.router(x).float().topk(self.top_k, dim=-1)
        shares = torch.softmax(logits, dim=-1).flatten()
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // self.top_k
        counts = chosen.flatten().bincount(minlength=len(self.down)).tolist()
        parts = []
        for expert, rows in enumerate(x[tokens].split_with_sizes(counts)):
            if rows.shape[0]:
                gate, up = self.gate_up[expert](rows).chunk(2, dim=-1)
                parts.append(self.down[expert](F.silu(gate).mul_(up)))
        # Each token gathers its own rows: a GPU that adds rows to tokens by index does so in any
        # order, and the same prompt would have other last bits each time.
        rows_of = torch.argsort(by_expert).view(-1, self.top_k)
        shares = shares.view(-1, self.top_k)
        summed = F.embedding_bag(
            rows_of, torch.cat(parts).float(), per_sample_weights=shares, mode="sum"
        )
        return summed.to(x.dtype) if residual is None else (residual + summed).to(residual.dtype)
