"""Token mixers of hybrid models behind one call: each knows its own cache and its own group.

A layer may have one mixer, or several in parallel over the same normed input.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.forward import (
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    LayerCache,
    StateCache,
    StateIndex,
)
from engine.layers.attention import PagedAttention
from engine.layers.mamba2 import Mamba2
from engine.layers.projection import load_linear
from engine.layers.rotary import rotate_
from engine.layers.weights import Weights
from engine.model_configs.attention import AttentionConfig
from engine.model_configs.mamba2 import Mamba2Config
from engine.ops.scratch import Scratch

CacheKey = tuple[int, int]
"""(KV cache group, layer index in the model)."""


@dataclass(slots=True, frozen=True)
class ForwardPass:
    """What all mixers of one pass share; `rotary` is `Rotary.select`'s table, None without one."""

    batch: ForwardBatch
    caches: dict[CacheKey, LayerCache]
    rotary: Tensor | None


class Mixer(Protocol):
    """residual + mixer(x), both [T, hidden]."""

    def __call__(self, x: Tensor, residual: Tensor, step: ForwardPass) -> Tensor: ...


class MambaMixer:
    """`Mamba2` with the cache of `key`."""

    def __init__(
        self,
        config: Mamba2Config,
        weights: Weights,
        prefix: str,
        *,
        key: CacheKey,
        hidden: int,
        eps: float,
    ) -> None:
        self.key = key
        self.mamba = Mamba2(config, weights, prefix, hidden=hidden, eps=eps)

    def __call__(self, x: Tensor, residual: Tensor, step: ForwardPass) -> Tensor:
        cache, index = step.caches[self.key], step.batch.group_index[self.key[0]]
        assert isinstance(cache, StateCache)
        assert isinstance(index, StateIndex)
        return self.mamba(x, residual, cache, index=index, batch=step.batch)


class AttentionMixer:
    """Tensors `<prefix>.{q,k,v,o}_proj.{weight,bias}`; q, k and v are one product."""

    def __init__(
        self,
        config: AttentionConfig,
        weights: Weights,
        prefix: str,
        *,
        key: CacheKey,
        hidden: int,
        scratch: Scratch,
    ) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.key = key
        self.dim = dim
        self.rotated = config.rope is not None
        self._heads = [heads + kv_heads, kv_heads]
        self.qkv = load_linear(
            weights,
            prefix,
            {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim},
            inputs=hidden,
            bias=config.bias,
            input_scale=config.input_scale,
        )
        self.out = load_linear(
            weights,
            prefix,
            {"o_proj": hidden},
            inputs=heads * dim,
            bias=config.bias,
            output_scale=config.output_scale,
        )
        self.attention = PagedAttention(heads, kv_heads, dim, config.scale, scratch=scratch)

    def __call__(self, x: Tensor, residual: Tensor, step: ForwardPass) -> Tensor:
        cache, index = step.caches[self.key], step.batch.group_index[self.key[0]]
        assert isinstance(cache, AttentionCache)
        assert isinstance(index, AttentionIndex)
        heads = self.qkv(x).view(x.shape[0], -1, self.dim)
        qk, v = heads.split_with_sizes(self._heads, dim=1)
        if self.rotated:
            assert step.rotary is not None
            rotate_(qk, step.rotary)
        q, k = qk.split_with_sizes([qk.shape[1] - v.shape[1], v.shape[1]], dim=1)
        return self.out.add_to(residual, self.attention(q, k, v, cache, index, step.batch))
