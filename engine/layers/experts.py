"""A sparse mixture of experts: every token goes through the few MLPs that a router picks.

Tokens are sorted by expert, so each expert that was chosen does one product over its tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import Linear, scaled
from engine.layers.mixer import ForwardPass
from engine.layers.weights import Weights
from engine.model_configs.feed_forward import ExpertsConfig
from engine.model_configs.model_config import ModelConfig


class Experts:
    """Tensors `gate.weight` (the router's) and `experts.{gate_up_proj,down_proj}`, stacked.

    gate_up_proj [experts, 2 * intermediate, hidden] gives gate and up. A token's weights are a
    softmax over the router's `top_k` largest logits.
    """

    def __init__(self, config: ExpertsConfig, weights: Weights, model: ModelConfig) -> None:
        count, inner, hidden = config.count, config.intermediate_size, model.hidden_size
        self.top_k = config.top_k
        self.router = Linear(weights.take("gate.weight", (count, hidden)))
        gate_up = weights.take("experts.gate_up_proj", (count, 2 * inner, hidden))
        self.gate_up = [Linear(matrix) for matrix in gate_up]
        down = weights.take("experts.down_proj", (count, hidden, inner))
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
