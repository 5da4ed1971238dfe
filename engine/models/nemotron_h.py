"""Nemotron-H (Mamba2, attention and feed-forward layers, one kind each) over shared layers.

Checkpoint names are the hub's (`backbone.*`), which transformers writes too.
"""

import torch
from torch import Tensor

from engine.forward import (
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    LayerCaches,
    StateCache,
    StateIndex,
)
from engine.layers.attention import PagedAttention
from engine.layers.embedding import Embedding, output_head
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2
from engine.layers.norm import RMSNorm
from engine.layers.weights import Weights
from engine.model_configs.nemotron_h import LayerKind, NemotronHConfig


def rename(stored: str) -> str | None:
    """`model.*` (transformers 5 inside) to `backbone.*`; prediction heads are skipped."""
    if stored.startswith("mtp."):
        return None
    return stored.replace("model.", "backbone.", 1) if stored.startswith("model.") else stored


class NemotronH:
    """Hidden states and logits of a packed batch; keeps K/V and states in `caches`."""

    def __init__(self, config: NemotronHConfig, weights: Weights) -> None:
        hidden = config.hidden_size
        self.dtype = weights.dtype
        self.residual_dtype = torch.float32 if config.residual_in_fp32 else weights.dtype
        self.embeddings = Embedding(
            weights.take("backbone.embeddings.weight", (config.vocab_size, hidden))
        )
        self.layers = [_Layer(config, weights, index) for index in range(config.num_layers)]
        self.norm = RMSNorm(weights.take("backbone.norm_f.weight", (hidden,)), config.rms_norm_eps)
        self.head = output_head(weights, self.embeddings, tied=config.tie_word_embeddings)

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [T, hidden] after the last norm."""
        hidden = self.embeddings(batch.token_ids).to(self.residual_dtype)
        for layer in self.layers:
            hidden = layer(hidden, batch, caches)
        return self.norm(hidden).to(self.dtype)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 logits [rows, vocab] of some rows of hidden states."""
        return self.head(hidden_rows).float()


class _Layer:
    """residual + mixer(norm(residual))."""

    def __init__(self, config: NemotronHConfig, weights: Weights, index: int) -> None:
        prefix = f"backbone.layers.{index}"
        eps = config.rms_norm_eps
        self.norm = RMSNorm(weights.take(f"{prefix}.norm.weight", (config.hidden_size,)), eps)
        self.mixer = _MIXERS[config.layer_kinds[index]](config, weights, index)
        self.dtype = weights.dtype

    def __call__(self, residual: Tensor, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        x = self.norm(residual).to(self.dtype)
        if residual.dtype == x.dtype:
            return self.mixer(x, residual, batch, caches)
        return residual + self.mixer(x, torch.zeros_like(x), batch, caches)


class _MambaMixer:
    def __init__(self, config: NemotronHConfig, weights: Weights, index: int) -> None:
        self.key = (_group_of(config, index), index)
        self.mamba = Mamba2(
            config.mamba,
            weights,
            f"backbone.layers.{index}.mixer",
            hidden=config.hidden_size,
            eps=config.rms_norm_eps,
        )

    def __call__(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, caches: LayerCaches
    ) -> Tensor:
        cache, index = caches[self.key], batch.group_index[self.key[0]]
        assert isinstance(cache, StateCache)
        assert isinstance(index, StateIndex)
        return self.mamba(x, residual, cache, index=index, batch=batch)


class _AttentionMixer:
    """Grouped-query attention without positional encoding; q, k and v are one product."""

    def __init__(self, config: NemotronHConfig, weights: Weights, index: int) -> None:
        shape = config.attention
        prefix = f"backbone.layers.{index}.mixer"
        hidden, dim = config.hidden_size, shape.head_dim
        self.key = (_group_of(config, index), index)
        self.heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.head_dim = dim
        sizes = {f"{name}_proj": n * dim for name, n in zip("qkv", self.heads, strict=True)}
        self.qkv = _product(weights, prefix, sizes, hidden, bias=shape.bias)
        inner = shape.num_heads * dim
        self.out = _product(weights, prefix, {"o_proj": hidden}, inner, bias=shape.bias)
        self.attention = PagedAttention(shape.num_heads, shape.num_kv_heads, dim, dim**-0.5)

    def __call__(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, caches: LayerCaches
    ) -> Tensor:
        cache, index = caches[self.key], batch.group_index[self.key[0]]
        assert isinstance(cache, AttentionCache)
        assert isinstance(index, AttentionIndex)
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = torch.split(heads, self.heads, dim=1)
        return self.out.add_to(residual, self.attention(q, k, v, cache, index, batch))


class _MlpMixer:
    """down(relu(up(x))^2)."""

    def __init__(self, config: NemotronHConfig, weights: Weights, index: int) -> None:
        prefix = f"backbone.layers.{index}.mixer"
        inner, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.up = _product(weights, prefix, {"up_proj": inner}, hidden, bias=bias)
        self.down = _product(weights, prefix, {"down_proj": hidden}, inner, bias=bias)

    def __call__(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, caches: LayerCaches
    ) -> Tensor:
        return self.down.add_to(residual, self.up(x).relu_().square_())


_MIXERS: dict[LayerKind, type[_MambaMixer] | type[_AttentionMixer] | type[_MlpMixer]] = {
    LayerKind.MAMBA: _MambaMixer,
    LayerKind.ATTENTION: _AttentionMixer,
    LayerKind.MLP: _MlpMixer,
}


def _group_of(config: NemotronHConfig, layer: int) -> int:
    return next(i for i, group in enumerate(config.groups) if layer in group.layers)


def _product(
    weights: Weights, prefix: str, sizes: dict[str, int], inputs: int, *, bias: bool
) -> Linear:
    """One product for stored projections of the same input: {name: outputs}."""
    names = {f"{prefix}.{name}": size for name, size in sizes.items()}
    matrices = [weights.take(f"{name}.weight", (size, inputs)) for name, size in names.items()]
    if not bias:
        return Linear.merged(matrices)
    biases = [weights.take(f"{name}.bias", (size,)) for name, size in names.items()]
    return Linear.merged(matrices, biases)
