"""The gated delta net mixer: one input product, conv, gated delta rule, gated norm.

Reads and writes its state in the cache only, so prefill, chunked prefill and decode are one thing.
"""

import torch
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.recurrent import GatedDeltaNetConfig, Gating
from engine.ops.backend import Product
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.weights.weights import Weights


class GatedDeltaNet:
    """Tensors `{in_proj_{qkv,z,b,a}.weight, conv1d, A_log, dt_bias, norm, out_proj}`.

    Or `in_proj_{qkvz,ba}.weight`, packed as in Qwen3-Next; or q, k and v apart: `{q,k,v}_proj` and
    `{q,k,v}_conv1d`.
    """

    def __init__(
        self, config: GatedDeltaNetConfig, weights: Weights, model: ModelConfig, key: CacheKey
    ) -> None:
        self.config = config
        self.key = key
        self.ops = weights.ops
        hidden, heads = model.hidden_size, config.value_heads
        self.in_proj = _in_proj(config, weights, hidden)
        self.out_proj = load_linear(weights, {"out_proj": hidden}, inputs=config.values)
        convs = ["conv1d.weight"]
        if convs[0] not in weights:
            convs = [f"{name}_conv1d.weight" for name in "qkv"]
        taps = weights.take_joined(convs, (config.conv_dim, 1, config.conv_kernel))
        self.conv_weight = taps[:, 0].t().contiguous()
        # Stored as a logarithm so that training keeps it positive; the decay is exp(rate * dt).
        self.parameters = DeltaRuleParameters(
            rate=-weights.take("A_log", (heads,), torch.float32).exp(),
            dt_bias=weights.take("dt_bias", (heads,), torch.float32),
            beta_scale=config.beta_scale,
        )
        eps = model.rms_norm_eps if config.norm_eps is None else config.norm_eps
        weight = weights.take("norm.weight", (config.value_dim,))
        # The gate comes after the norm: the other way round than in Mamba2.
        self.gated_norm = self.ops.gated_norm(weight, eps, gating=Gating.NORM_THEN_GATE)
        self._splits = [config.conv_dim, config.values, heads, heads]
        self._qkv = [config.keys, config.keys, config.values]

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        config = self.config
        (conv, temporal), index = step.states(self.key)
        mixed, gate, b, a = self.in_proj(x).split_with_sizes(self._splits, dim=-1)
        mixed = self.ops.causal_conv1d(mixed, conv, index, self.conv_weight, None)
        q, k, v = mixed.split_with_sizes(self._qkv, dim=-1)
        o = self.ops.gated_delta_rule(
            q.view(-1, config.key_heads, config.key_dim),
            k.view(-1, config.key_heads, config.key_dim),
            v.view(-1, config.value_heads, config.value_dim),
            a,
            b,
            temporal,
            index,
            parameters=self.parameters,
        )
        return self.out_proj(self.gated_norm(o, gate), residual)


def _in_proj(config: GatedDeltaNetConfig, weights: Weights, hidden: int) -> Product:
    """The product that gives q, k, v, z, b and a side by side, however they are stored."""
    heads, values = config.value_heads, config.values
    if "in_proj_qkvz.weight" in weights:
        packed = {"in_proj_qkvz": config.conv_dim + values, "in_proj_ba": 2 * heads}
        return load_linear(weights, packed, inputs=hidden, order=_unpacked(config))
    sizes = {"in_proj_qkv": config.conv_dim}
    if "in_proj_qkv.weight" not in weights:
        sizes = {"q_proj": config.keys, "k_proj": config.keys, "v_proj": values}
    sizes |= {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    return load_linear(weights, sizes, inputs=hidden)


def _unpacked(config: GatedDeltaNetConfig) -> Tensor:
    """The places of q, k, v, z, b and a among packed outputs, which go by key head.

    q0 k0 v0 v1 z0 z1 | q1 k1 v2 v3 z2 z3 | b0 b1 a0 a1 | b2 b3 a2 a3, for two value heads a key.
    """
    keys, shared = config.key_heads, config.value_heads // config.key_heads
    values = shared * config.value_dim
    qkvz = torch.arange(config.conv_dim + config.values).view(keys, -1)
    ba = torch.arange(2 * config.value_heads).view(keys, -1) + qkvz.numel()
    sizes = [config.key_dim, config.key_dim, values, values]
    parts = *qkvz.split_with_sizes(sizes, 1), *ba.split_with_sizes([shared, shared], 1)
    return torch.cat([part.flatten() for part in parts])
