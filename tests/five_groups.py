"""A random model with five KV cache groups, interleaved, built from the product's own layers.

Full attention in blocks of 32 tokens, two sliding windows in blocks of 16, Mamba2 of two sizes.
"""

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex, ForwardBatch, LayerCaches
from engine.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheGroup,
    LayerSpec,
    MambaSpec,
    SlidingWindowSpec,
    form_groups,
)
from engine.layers.attention_layer import AttentionLayer
from engine.layers.embedding import Embedding, output_head
from engine.layers.mixers import ForwardPass, MambaMixer
from engine.layers.norm import load_norm
from engine.layers.qk_norm_attention import AttentionShape
from engine.layers.rotary import Rotary
from engine.layers.weights import Weights
from engine.model_configs.mamba2 import Mamba2Config
from engine.model_configs.rope import RopeConfig
from engine.ops.scratch import Scratch
from tests.oracle import spread

VOCABULARY, HIDDEN, EPS = 512, 48, 1e-6
FULL_BLOCK = 32
FULL = FullAttentionSpec(2, 16, "float32")
NEAR = SlidingWindowSpec(2, 16, "float32", window=20)
FAR = SlidingWindowSpec(1, 32, "float32", window=70)


def _mamba(heads: int, head_dim: int, state_size: int) -> Mamba2Config:
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        n_groups=1,
        conv_kernel=4,
        conv_bias=True,
        in_proj_bias=False,
        out_proj_bias=False,
        time_step_limit=(0.0, float("inf")),
    )


SMALL, LARGE = _mamba(4, 16, 16), _mamba(6, 16, 24)
STATES = {config.spec("float32", "float32"): config for config in (SMALL, LARGE)}
SMALL_STATE, LARGE_STATE = STATES
LAYERS: tuple[LayerSpec, ...] = (
    *(SMALL_STATE, NEAR, LARGE_STATE, FULL, FAR),
    *(LARGE_STATE, NEAR, SMALL_STATE, FULL),
)


def groups_in(order: Sequence[int]) -> tuple[KVCacheGroup, ...]:
    """The five groups, by their places in order of first appearance."""
    formed = form_groups(tuple((spec,) for spec in LAYERS))
    return tuple(
        replace(formed[place], block_size=FULL_BLOCK if formed[place].spec == FULL else None)
        for place in order
    )


class DrawnWeights(Weights):
    """Tensors that depend on nothing but their names."""

    def __init__(self) -> None:
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A random tensor, spread as those of `widen`."""
        draw = torch.Generator().manual_seed(crc32(name.encode()))
        tensor = spread(name, torch.ones(shape), draw)
        return 0.1 * tensor if "embed" in name else tensor


class FiveGroups:
    """The model; `groups` are those of its arena's plan, in any order."""

    def __init__(self, groups: tuple[KVCacheGroup, ...]) -> None:
        weights, scratch = DrawnWeights(), Scratch()
        group_of = {group.spec: number for number, group in enumerate(groups)}
        self.keys = [(group_of[spec], layer) for layer, spec in enumerate(LAYERS)]
        self.embed = Embedding(weights.take("embed.weight", (VOCABULARY, HIDDEN)))
        self.rotary = Rotary(RopeConfig(10_000.0, 16), weights.dtype, weights.device)
        self.norms = [
            load_norm(weights, f"{layer}.norm", HIDDEN, eps=EPS) for layer in range(len(LAYERS))
        ]
        self.layers = [
            _layer(spec, key, weights, scratch=scratch)
            for spec, key in zip(LAYERS, self.keys, strict=True)
        ]
        self.norm = load_norm(weights, "norm", HIDDEN, eps=EPS)
        self.head = output_head(weights, self.embed, tied=False)

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [T, hidden] after the last norm."""
        x = self.embed(batch.token_ids)
        step = ForwardPass(batch, caches, self.rotary.select(batch))
        for layer, norm, key in zip(self.layers, self.norms, self.keys, strict=True):
            if isinstance(layer, MambaMixer):
                x = layer(norm(x), x, step)
            else:
                x = _attend(layer, x, step, key)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        return self.head(hidden_rows)


def _layer(
    spec: LayerSpec, key: tuple[int, int], weights: Weights, *, scratch: Scratch
) -> AttentionLayer | MambaMixer:
    prefix = str(key[1])
    if isinstance(spec, MambaSpec):
        return MambaMixer(STATES[spec], weights, prefix, key=key, hidden=HIDDEN, eps=EPS)
    shape = AttentionShape(
        hidden=HIDDEN,
        heads=4,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        eps=EPS,
        gated=False,
        norm_offset=0.0,
        window=spec.window if isinstance(spec, SlidingWindowSpec) else None,
    )
    return AttentionLayer(shape, weights, prefix, intermediate=2 * HIDDEN, scratch=scratch)


def _attend(layer: AttentionLayer, x: Tensor, step: ForwardPass, key: tuple[int, int]) -> Tensor:
    cache, index = step.caches[key], step.batch.group_index[key[0]]
    assert isinstance(cache, AttentionCache)
    assert isinstance(index, AttentionIndex)
    assert step.rotary is not None
    return layer(x, step.rotary, cache, index=index, batch=step.batch)
