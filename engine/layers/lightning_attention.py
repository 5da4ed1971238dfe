"""Lightning attention (MiniMax-01, arXiv 2501.08313): linear attention with a decay for each head.

Reads and writes its state in the cache only, so prefill, chunked prefill and decode are one thing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.recurrent import Gating, LightningAttentionConfig
from engine.ops.ssd.parameters import SSDParameters
from engine.weights.weights import Weights

# Of the norm after the heads, whatever the model's other norms have.
NORM_EPS = 1e-6


class LightningAttention:
    """Tensors `{qkv_proj,output_gate,out_proj,norm}.weight`; qkv_proj gives q, k, v head by head.

    The recurrence is Mamba2's with steps of one: a head's S <- exp(-slope) S + v k^T gives S q.
    """

    def __init__(
        self,
        config: LightningAttentionConfig,
        weights: Weights,
        model: ModelConfig,
        key: CacheKey,
    ) -> None:
        self.config = config
        self.key = key
        self.ssd = weights.ops.ssd
        hidden, inner = model.hidden_size, config.num_heads * config.head_dim
        self.in_proj = load_linear(
            weights,
            {"qkv_proj": 3 * inner, "output_gate": inner},
            inputs=hidden,
            order=_parts_apart(config),
        )
        self.out_proj = load_linear(
            weights, {"out_proj": hidden}, inputs=inner, output_scale=config.output_scale
        )
        weight = weights.take("norm.weight", (inner,))
        gating = Gating.NORM_THEN_SIGMOID
        self.gated_norm = weights.ops.gated_norm(weight, NORM_EPS, gating=gating)
        slopes = _slopes(config.num_heads, layer=key[1], layers=len(model.layers))
        self.parameters = SSDParameters(a=-slopes.to(weights.device))
        self._splits = [3 * inner, inner]

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        config, rows = self.config, x.shape[0]
        (state,), index = step.states(self.key)
        qkv, gate = self.in_proj(x).split_with_sizes(self._splits, dim=-1)
        q, k, v = F.silu(qkv).view(rows, 3, config.num_heads, config.head_dim).unbind(1)
        y = self.ssd(v, None, k, q, state, index, parameters=self.parameters)
        return self.out_proj(self.gated_norm(y, gate), residual)


def _slopes(heads: int, *, layer: int, layers: int) -> Tensor:
    """float32 [heads]: 2^(-8h / heads) for the heads 1, 2, ..., less and less in deeper layers."""
    rates = torch.exp2(torch.arange(1, heads + 1) * (-8.0 / heads))
    # The last layer's heads still forget a little; the model was trained with both of these 1e-5.
    return rates * (1.0 - layer / (layers - 1 + 1e-5) + 1e-5)


def _parts_apart(config: LightningAttentionConfig) -> Tensor:
    """Takes q | k | v | q | k | v | ..., by heads, then the gate, to q | k | v | gate."""
    inner = config.num_heads * config.head_dim
    qkv = torch.arange(3 * inner).view(config.num_heads, 3, config.head_dim).transpose(0, 1)
    return torch.cat([qkv.flatten(), torch.arange(3 * inner, 4 * inner)])
