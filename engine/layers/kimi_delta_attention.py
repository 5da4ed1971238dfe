"""Kimi delta attention (Kimi Linear, arXiv 2510.26692): a delta rule that decays by key channel.

Reads and writes its state in the cache only, so prefill, chunked prefill and decode are one thing.
"""

import torch
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.recurrent import Gating, KimiDeltaAttentionConfig
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.weights.weights import Weights


class KimiDeltaAttention:
    """Tensors `{q,k,v,b,f_a,f_b,g_a,g_b,o}_proj.weight`, `A_log`, `dt_bias` and `o_norm.weight`.

    And `{q,k,v}_conv1d.weight`, or `conv1d.weight` of all three. The decay comes from f_b(f_a(x)),
    the gate of the output from g_b(g_a(x)).
    """

    def __init__(
        self, config: KimiDeltaAttentionConfig, weights: Weights, model: ModelConfig, key: CacheKey
    ) -> None:
        self.config = config
        self.key = key
        self.ops = weights.ops
        hidden, heads = model.hidden_size, config.num_heads
        inner, head = config.inner_size, config.head_dim
        sizes = {
            "q_proj": inner,
            "k_proj": inner,
            "v_proj": inner,
            "f_a_proj": head,
            "g_a_proj": head,
            "b_proj": heads,
        }
        self.in_proj = load_linear(weights, sizes, inputs=hidden)
        self.forget = load_linear(weights, {"f_b_proj": inner}, inputs=head)
        self.gate = load_linear(weights, {"g_b_proj": inner}, inputs=head)
        self.out_proj = load_linear(weights, {"o_proj": hidden}, inputs=inner)
        self.conv_weight = _taps(config, weights)
        # Stored as a logarithm so that training keeps it positive; the decay is exp(rate * dt).
        rate = weights.take("A_log", (1, 1, heads, 1), torch.float32)
        self.parameters = DeltaRuleParameters(
            rate=-rate.exp().view(heads),
            dt_bias=weights.take("dt_bias", (inner,), torch.float32).view(heads, head),
        )
        weight, eps = weights.take("o_norm.weight", (head,)), model.rms_norm_eps
        self.gated_norm = self.ops.gated_norm(weight, eps, gating=Gating.NORM_THEN_SIGMOID)
        self._splits = [3 * inner, head, head, heads]

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        shape = (x.shape[0], self.config.num_heads, self.config.head_dim)
        (conv, temporal), index = step.states(self.key)
        mixed, forget, gate, b = self.in_proj(x).split_with_sizes(self._splits, dim=-1)
        decay = self.forget(forget).view(shape)
        mixed = self.ops.causal_conv1d(mixed, conv, index, self.conv_weight, None)
        q, k, v = (part.view(shape) for part in mixed.chunk(3, dim=-1))
        o = self.ops.gated_delta_rule(
            q, k, v, decay, b, temporal, index, parameters=self.parameters
        )
        return self.out_proj(self.gated_norm(o, self.gate(gate)), residual)


def _taps(config: KimiDeltaAttentionConfig, weights: Weights) -> Tensor:
    """The weights [K, 3 * inner] of one convolution over queries, keys and values."""
    inner, kernel = config.inner_size, config.conv_kernel
    if "conv1d.weight" in weights:
        taps = weights.take("conv1d.weight", (3 * inner, 1, kernel))
    else:
        names = (f"{name}_conv1d.weight" for name in "qkv")
        taps = torch.cat([weights.take(name, (inner, 1, kernel)) for name in names])
    return taps[:, 0].t().contiguous()
