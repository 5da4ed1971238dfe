"""A sparse mixture of experts: every token goes through the few gated MLPs that a router picks.

Tokens are sorted by expert, so each expert that was chosen does one product over its tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.projection import scaled
from engine.layers.weights import Weights
from engine.model_configs.experts import ExpertsConfig


class Experts:
    """Tensors `<prefix>.{router.layer,input_linear,output_linear}.weight`, the last two stacked.

    input_linear [experts, 2 * intermediate, hidden] gives gate and up. A token's weights are a
    softmax over the router's `top_k` largest logits; `output_scale` multiplies the result.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        weights: Weights,
        prefix: str,
        *,
        hidden: int,
        output_scale: float,
    ) -> None:
        count, inner = config.count, config.intermediate_size
        self.top_k = config.top_k
        self.router = Linear(weights.take(f"{prefix}.router.layer.weight", (count, hidden)))
        gate_up = weights.take(f"{prefix}.input_linear.weight", (count, 2 * inner, hidden))
        self.gate_up = [Linear(matrix) for matrix in gate_up]
        down = weights.take(f"{prefix}.output_linear.weight", (count, hidden, inner))
        self.down = [Linear(matrix) for matrix in scaled(down, output_scale)]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + experts(x), both [T, hidden]; sums over experts are float32."""
        logits, chosen = self.router(x).float().topk(self.top_k, dim=-1)
        shares = torch.softmax(logits, dim=-1).flatten()
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // self.top_k
        counts = chosen.flatten().bincount(minlength=len(self.down)).tolist()
        parts = [
            self._run(expert, rows)
            for expert, rows in enumerate(x[tokens].split_with_sizes(counts))
            if rows.shape[0]
        ]
        weighted = torch.cat(parts).float().mul_(shares[by_expert].unsqueeze(1))
        return residual.float().index_add(0, tokens, weighted).to(residual.dtype)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        gate, up = self.gate_up[expert](rows).chunk(2, dim=-1)
        return self.down[expert](F.silu(gate).mul_(up))
