"""A random model with five KV cache groups, interleaved, built as the product builds its families.

Full attention in blocks of 32 tokens, two sliding windows in blocks of 16, Mamba2 of two sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from benchmarks.support.small_models import spread
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, SlidingWindowSpec, form_groups
from engine.model_configs.attention import AttentionConfig, QKNorm
from engine.model_configs.feed_forward import MLPConfig
from engine.model_configs.model_config import MixerConfig, ModelConfig, NamedPart, decoder_layer
from engine.model_configs.recurrent import Mamba2Config
from engine.model_configs.rope import RopeConfig
from engine.models.hybrid import HybridModel, build
from engine.ops.backend import torch_ops
from engine.weights.weights import Weights

VOCABULARY, HIDDEN = 512, 48
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


def _attention(kv_heads: int, head_dim: int, window: int | None = None) -> AttentionConfig:
    return AttentionConfig(
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeConfig(10_000.0, 16),
        window=window,
        qk_norm=QKNorm.BY_HEAD,
    )


SMALL, LARGE = _mamba(4, 16, 16), _mamba(6, 16, 24)
ALL, NEARBY, FARTHER = _attention(2, 16), _attention(2, 16, window=20), _attention(1, 32, window=70)
LAYERS: tuple[MixerConfig, ...] = (
    *(SMALL, NEARBY, LARGE, ALL, FARTHER),
    *(LARGE, NEARBY, SMALL, ALL),
)
SMALL_STATE, LARGE_STATE = (config.spec("float32") for config in (SMALL, LARGE))


def groups_in(order: Sequence[int]) -> tuple[KVCacheGroup, ...]:
    """The five groups, by their places in order of first appearance."""
    formed = form_groups(tuple((mixer.spec("float32"),) for mixer in LAYERS))
    return tuple(
        replace(formed[place], block_size=FULL_BLOCK if formed[place].spec == FULL else None)
        for place in order
    )


class DrawnWeights(Weights):
    """Tensors that depend on nothing but their names."""

    def __init__(self) -> None:
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.ops = torch_ops()
        self._prefix = ""

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """A random tensor, spread as those of `widen`."""
        name = self._prefix + name
        draw = torch.Generator().manual_seed(crc32(name.encode()))
        tensor = spread(name, torch.ones(shape), draw)
        drawn = 0.1 * tensor if "embed" in name else tensor
        return drawn if out is None else out.copy_(drawn)

    def holds_twice(self, name: str, other: str) -> bool:
        """Tensors of two names differ."""
        return False

    def __contains__(self, name: str) -> bool:
        """Every tensor is there, but none that holds several side by side."""
        return not name.startswith(("gate_up", "in_proj_qkvz"))


@dataclass(slots=True, frozen=True, kw_only=True)
class _Config(ModelConfig):
    """Of the model whose groups are in the order of `own_groups`."""

    own_groups: tuple[KVCacheGroup, ...]

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """Not in order of first appearance."""
        return self.own_groups


def five_groups(groups: tuple[KVCacheGroup, ...]) -> HybridModel:
    """The model; `groups` are those of its arena's plan, in any order."""
    mlp = MLPConfig(intermediate_size=2 * HIDDEN)
    config = _Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        dtype="float32",
        layers=tuple(decoder_layer([_named(mixer)], [("mlp", mlp)]) for mixer in LAYERS),
        own_groups=groups,
    )
    return build(config, DrawnWeights())


def _named(mixer: MixerConfig) -> NamedPart:
    return ("self_attn" if isinstance(mixer, AttentionConfig) else "mamba"), mixer
