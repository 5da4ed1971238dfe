"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), absorbed: heads attend to latents.

A head's key and value are products of a token's latent c: q (W_UK c) = (W_UK^T q) c, and the sum of
p W_UV c is W_UV times that of p c. So all heads read one vector per token, its latent and the
channels of keys that heads share, as key and value at once. In prefill of many tokens, products
with the heads' own keys and values would be fewer; the absorbed form serves both.
"""

import torch
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.attention import LatentAttentionConfig
from engine.model_configs.model_config import ModelConfig
from engine.ops.backend import Norm, Product
from engine.weights.weights import Weights


class LatentAttention:
    """Tensors `{kv_a_proj_with_mqa,kv_b_proj,o_proj}.weight` and `kv_a_layernorm.weight`.

    Queries: `q_proj.weight`, or `{q_a_proj,q_a_layernorm,q_b_proj}.weight` with a latent.
    """

    def __init__(
        self, config: LatentAttentionConfig, weights: Weights, model: ModelConfig, key: CacheKey
    ) -> None:
        self.config = config
        self.key = key
        hidden, heads, rank = model.hidden_size, config.num_heads, config.kv_lora_rank
        queries = heads * config.qk_head_dim
        name, first = ("q_proj", queries)
        self.q_norm: Norm | None = None
        self.q_b: Product | None = None
        if config.q_lora_rank is not None:
            name, first = ("q_a_proj", config.q_lora_rank)
            self.q_norm = _norm(weights, "q_a_layernorm", first, config.norm_eps)
            self.q_b = load_linear(weights, {"q_b_proj": queries}, inputs=first)
        sizes = {name: first, "kv_a_proj_with_mqa": config.width}
        self.in_proj = load_linear(weights, sizes, inputs=hidden)
        self.kv_norm = _norm(weights, "kv_a_layernorm", rank, config.norm_eps)
        each = (config.qk_nope_head_dim, config.v_head_dim)
        stored = weights.take("kv_b_proj.weight", (heads * sum(each), rank))
        to_keys, to_values = stored.view(heads, sum(each), rank).split_with_sizes(each, dim=1)
        self.to_keys, self.from_latents = to_keys.contiguous(), to_values.mT.contiguous()
        self.out_proj = load_linear(weights, {"o_proj": hidden}, inputs=heads * config.v_head_dim)
        self.attend = weights.ops.paged_attention
        self._splits = [first, rank, config.qk_rope_head_dim]

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        config, rows = self.config, x.shape[0]
        q, latent, shared = self.in_proj(x).split_with_sizes(self._splits, dim=-1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_norm(q))
        kept = torch.cat([self.kv_norm(latent), shared], dim=-1).unsqueeze(1)
        own, common = q.view(rows, config.num_heads, -1).split_with_sizes(
            [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        # Head by head: [H, T, channels of a key] times [H, channels of a key, rank].
        absorbed = torch.bmm(own.transpose(0, 1), self.to_keys).transpose(0, 1)
        cache, index = step.attention(self.key)
        q = torch.cat([absorbed, common], dim=-1)
        seen = self.attend(q, kept, None, cache, index, scale=config.scale, window=None)
        latents = seen.view(rows, config.num_heads, -1)[..., : config.kv_lora_rank]
        out = torch.bmm(latents.transpose(0, 1), self.from_latents).transpose(0, 1)
        return self.out_proj(out.reshape(rows, -1), residual)


def _norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    return weights.ops.norm(weights.take(f"{name}.weight", (size,)), eps, weights.dtype)
