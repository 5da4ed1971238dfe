"""A model in numbers and names, for engine, planner and builder. Torch-free.

A layer is blocks, a block is parts around one residual, and a part is the settings of a mixer or a
feed-forward part with the name of its tensors:

    x --+- (norm) -+-- part --+-- (post_norm) -- + --> x
        |          +-- part --+                  |
        +----------------------------------------+
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from engine.kv_cache.spec import KVCacheGroup, LayerSpec, form_groups
from engine.model_configs.attention import AttentionConfig, LatentAttentionConfig
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig
from engine.model_configs.quantization import UNUSED_SCALES, Float8Config, read_quantization
from engine.model_configs.recurrent import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LightningAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    ShortConvConfig,
)

MixerConfig = (
    AttentionConfig
    | LatentAttentionConfig
    | Mamba1Config
    | Mamba2Config
    | GatedDeltaNetConfig
    | ShortConvConfig
    | LightningAttentionConfig
    | KimiDeltaAttentionConfig
)
"""A part that keeps something in the cache: its `spec` says what."""
FeedForwardConfig = MLPConfig | ExpertsConfig
PartConfig = MixerConfig | FeedForwardConfig

NamedPart = tuple[str, PartConfig]
"""The name below the layer's of the part's tensors, and what it is."""
Renames = tuple[tuple[str, str | None], ...]
"""Stored names of tensors to those that a model asks for.

Every (pattern, replacement) in order, as of `re.sub`; a tensor whose name has a pattern with None
is skipped by design. `COMMON_SKIPS` come after those of a family.
"""
COMMON_SKIPS: Final[Renames] = (
    # Heads that predict further tokens.
    (r"^(model\.)?mtp\.", None),
    # Towers of wrappers, and what takes their outputs to those of embeddings.
    (r"^(model\.)?(visual|vision_tower|vision_model|audio_tower)\.", None),
    (r"^(model\.)?(multi_modal_projector|mm_projector|embed_vision|embed_audio)\.", None),
    # Computed from the config.
    (r"rotary_emb\.inv_freq$", None),
)
DTYPE_KEYS: Final = ("dtype", "torch_dtype")
"""Fields that name the type of weights and activations, the first wins."""
HEAD: Final = "lm_head.weight"
"""The name of the output head's matrix."""
PREDICTION_LAYERS: Final = ("num_nextn_predict_layers", "num_mtp_modules")
"""Fields for layers after the last that predict further tokens (DeepSeek and GLM, MiniMax)."""


def renamed(stored: str, renames: Renames) -> str | None:
    """The name by which a model asks for the tensor `stored`; None: it is skipped by design."""
    return _found(stored, renames)[0]


def skipped_by(stored: str, renames: Renames) -> str:
    """The part of a skipped tensor's name for which it is skipped."""
    return _found(stored, renames)[1]


def _found(stored: str, renames: Renames) -> tuple[str | None, str]:
    name = stored
    for pattern, replacement in (*renames, *COMMON_SKIPS):
        if replacement is not None:
            name = re.sub(pattern, replacement, name)
        elif match := re.search(pattern, name):
            return None, match[0]
    return name, ""


@dataclass(slots=True, frozen=True, kw_only=True)
class Block:
    """x + every part(norm(x)); the parts are in parallel, they read the same input.

    `norm`: the name of the norm before the parts; `post_norm`: of one over each part's result.
    None: there is no such norm. `normed_residual`: parts are added to norm(x) times this number,
    not to x.
    """

    norm: str | None
    parts: tuple[NamedPart, ...]
    post_norm: str | None = None
    normed_residual: float | None = None


def decoder_layer(
    mixers: Iterable[NamedPart],
    feed_forward: Iterable[NamedPart],
    *,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> tuple[Block, Block]:
    """The usual layer: a block of mixers, then a block of feed-forward parts."""
    return (
        Block(norm=norms[0], parts=tuple(mixers)),
        Block(norm=norms[1], parts=tuple(feed_forward)),
    )


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelConfig:
    """One model. Its tensors are found under their stored names after `renames`.

    `quantization`: how those are stored that are not plain numbers.

    `layers[i]`: the blocks of layer i. `dtype`: of weights and activations. `norm_offset` is added
    to stored norm weights. Embeddings are multiplied by `embedding_scale`, which is rounded to
    `dtype` first where `rounds_embedding_scale`; logits by `logits_scale`; then a logit x becomes
    cap * tanh(x / cap) where `logit_softcap` is set.
    """

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    dtype: str
    layers: tuple[tuple[Block, ...], ...]
    renames: Renames = ()
    quantization: Float8Config | None = None
    norm_offset: float = 0.0
    residual_in_fp32: bool = False
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logits_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def mixers(self) -> tuple[tuple[MixerConfig, ...], ...]:
        """The parts that keep something in the cache, by layer: none, one, or several."""
        return tuple(
            tuple(
                part
                for block in blocks
                for _, part in block.parts
                if not isinstance(part, FeedForwardConfig)
            )
            for blocks in self.layers
        )

    @property
    def layer_specs(self) -> tuple[tuple[LayerSpec, ...], ...]:
        """The cache contents of each layer."""
        return tuple(tuple(mixer.spec(self.dtype) for mixer in own) for own in self.mixers)

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """KV cache groups of the model, in order of first appearance."""
        return form_groups(self.layer_specs)


def read_model(reader: ConfigReader, *, positions: int, eps: float, **own: Any) -> ModelConfig:
    """A ModelConfig of `own` fields, and of the others under their common names.

    `positions` and `eps` are the family's defaults. Raises CheckpointError.
    """
    quantization = read_quantization(reader)
    renames: Renames = (*own.pop("renames", ()), *_prediction_layers(reader, len(own["layers"])))
    if quantization is not None:
        renames = (*renames, (UNUSED_SCALES, None))
    return ModelConfig(
        vocab_size=reader.size("vocab_size"),
        hidden_size=reader.size("hidden_size"),
        max_position_embeddings=reader.size("max_position_embeddings", positions),
        tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
        dtype=next(filter(None, (reader.get(key, str, None) for key in DTYPE_KEYS)), "float32"),
        renames=renames,
        quantization=quantization,
        **{"rms_norm_eps": reader.get("rms_norm_eps", float, eps), **own},
    )


def _prediction_layers(reader: ConfigReader, layers: int) -> Renames:
    """Skips the layers after the last that config.json says are there, and no others."""
    count = sum(reader.count(key, 0) for key in PREDICTION_LAYERS)
    numbers = "|".join(map(str, range(layers, layers + count)))
    return ((rf"^model\.layers\.({numbers})\.", None),) if numbers else ()
