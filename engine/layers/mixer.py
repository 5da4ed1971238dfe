"""The one calling convention of a layer's parts, and the residual block around them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from engine.forward import (
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    LayerCaches,
    StateCache,
    StateIndex,
)
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.rope import RopeConfig
from engine.ops.backend import Norm
from engine.weights.weights import Weights

C = TypeVar("C", contravariant=True)
CacheKey = tuple[int, int]
"""(KV cache group, layer index in the model)."""


@dataclass(slots=True, frozen=True)
class ForwardPass:
    """One pass, shared by all parts; `rotary` holds what `Rotary.select` gave for each setting."""

    batch: ForwardBatch
    caches: LayerCaches
    rotary: Mapping[RopeConfig, Tensor]

    def attention(self, key: CacheKey) -> tuple[AttentionCache, AttentionIndex]:
        """The cache of an attention layer, and the batch's places in it."""
        cache, index = self.caches[key], self.batch.group_index[key[0]]
        assert isinstance(cache, AttentionCache)
        assert isinstance(index, AttentionIndex)
        return cache, index

    def states(self, key: CacheKey) -> tuple[tuple[Tensor, ...], StateIndex]:
        """The tensors of a recurrent layer's states, and the batch's places in them."""
        cache, index = self.caches[key], self.batch.group_index[key[0]]
        assert isinstance(cache, StateCache)
        assert isinstance(index, StateIndex)
        return cache.parts, index


class Part(Protocol):
    """A token mixer or a feed-forward block: [T, hidden] -> [T, hidden].

    With `residual` [T, hidden] the result is added to it, in the same product where that is faster.
    """

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor: ...


class MakeMixer(Protocol[C]):
    """The class of a mixer: built from its config, its tensors, its model's and its cache's key."""

    def __call__(
        self, config: C, weights: Weights, model: ModelConfig, key: CacheKey, /
    ) -> Part: ...


class MakeFeedForward(Protocol[C]):
    """The class of a part that keeps nothing."""

    def __call__(self, config: C, weights: Weights, model: ModelConfig, /) -> Part: ...


@dataclass(slots=True, frozen=True)
class ResidualBlock:
    """x + every part(norm(x)). Parts are in parallel: they read the same input.

    Without `norm` they read x. With `post_norm` a part's result is normed before it is added. With
    `normed_residual` it is added to norm(x) times that number (MiniMax-01, arXiv 2501.08313), not
    to x. The residual may be wider than the parts compute (float32 over bfloat16).
    """

    norm: Norm | None
    parts: Sequence[Part]
    post_norm: Norm | None = None
    normed_residual: float | None = None

    def __call__(self, x: Tensor, step: ForwardPass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        normed = x if self.norm is None else self.norm(x)
        if self.normed_residual is not None:
            x = normed * self.normed_residual
        for part in self.parts:
            # A product can add the residual itself, unless a norm or another dtype is in between.
            if self.post_norm is not None:
                x = self.post_norm(part(normed, None, step), x)
            elif x.dtype != normed.dtype:
                x = x + part(normed, None, step)
            else:
                x = part(normed, x, step)
        return x
