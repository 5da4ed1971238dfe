"""Attention of any family: one input product, perhaps norms, rotary and gate, paged attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.attention import AttentionConfig, QKNorm
from engine.model_configs.model_config import ModelConfig
from engine.weights.weights import Weights


class Attention:
    """Tensors `{q,k,v,o}_proj.{weight,bias}` and, with any `qk_norm`, `{q,k}_norm.weight`."""

    def __init__(
        self, config: AttentionConfig, weights: Weights, model: ModelConfig, key: CacheKey
    ) -> None:
        self.config = config
        self.key = key
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_width = 2 * width if config.gated else width
        self.in_proj = load_linear(
            weights,
            {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width},
            inputs=model.hidden_size,
            bias=config.bias,
            input_scale=config.input_scale,
            order=_gate_last(config) if config.gated else None,
        )
        self.out_proj = load_linear(
            weights,
            {"o_proj": model.hidden_size},
            inputs=width,
            bias=config.bias,
            output_scale=config.output_scale,
        )
        self.norm = _qk_norm(config, weights, model)
        self.ops = weights.ops
        self._splits = [width + kv_width, kv_width, q_width - width]

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        config, rows = self.config, x.shape[0]
        qk, v, gate = self.in_proj(x).split_with_sizes(self._splits, dim=-1)
        # q and k stay one tensor through norm and rotary: one kernel for both.
        qk = qk.view(rows, -1, config.head_dim)
        if self.norm is not None:
            qk = self.norm(qk)
        if config.rope is not None:
            self.ops.rotate_(qk, step.rotary[config.rope])
        q, k = qk.split_with_sizes([config.num_heads, config.num_kv_heads], dim=1)
        v = v.view(rows, config.num_kv_heads, config.head_dim)
        cache, index = step.attention(self.key)
        attend = self.ops.paged_attention
        out = attend(q, k, v, cache, index, scale=config.scale, window=config.window)
        return self.out_proj(self.ops.gate(out, gate) if config.gated else out, residual)


def _gate_last(config: AttentionConfig) -> Tensor:
    """The order that takes q | gate | q | gate | ... | k | v, by heads, to q | k | v | gate."""
    heads, dim = config.num_heads, config.head_dim
    q, gate = torch.arange(2 * heads * dim).view(heads, 2, dim).unbind(1)
    kv = torch.arange(2 * heads * dim, 2 * (heads + config.num_kv_heads) * dim)
    return torch.cat([q.flatten(), kv, gate.flatten()])


def _qk_norm(
    config: AttentionConfig, weights: Weights, model: ModelConfig
) -> Callable[[Tensor], Tensor] | None:
    """The norm of q and k side by side, [T, heads + kv_heads, head_dim] to the same shape."""
    if config.qk_norm is QKNorm.NONE:
        return None
    heads = (config.num_heads, config.num_kv_heads)
    by_head = config.qk_norm is QKNorm.BY_HEAD
    q, k = (
        weights.take(f"{name}_norm.weight", ((1 if by_head else own) * config.head_dim,)).float()
        + model.norm_offset
        for name, own in zip(("q", "k"), heads, strict=True)
    )
    make, eps, dtype = weights.ops.norm, model.rms_norm_eps, weights.dtype
    if by_head:
        return make(torch.cat([q.expand(heads[0], -1), k.expand(heads[1], -1)]), eps, dtype)
    norms = make(q, eps, dtype), make(k, eps, dtype)

    def all_heads(qk: Tensor) -> Tensor:
        parts = zip(norms, qk.split_with_sizes(heads, dim=1), strict=True)
        return torch.cat([norm(own.flatten(1)) for norm, own in parts], dim=1).view(qk.shape)

    return all_heads
