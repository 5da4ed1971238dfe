"""A model in numbers, for engine, planner and builder of any family. Torch-free."""

from dataclasses import dataclass
from typing import Any

from engine.kv_cache.spec import KVCacheGroup, LayerSpec, form_groups
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.mixers import AttentionConfig, GatedDeltaNetConfig, Mamba2Config

MixerConfig = AttentionConfig | Mamba2Config | GatedDeltaNetConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class MLPConfig:
    """One feed-forward block; `gate_scale` multiplies gate(x), `output_scale` the result."""

    intermediate_size: int
    bias: bool = False
    gate_scale: float = 1.0
    output_scale: float = 1.0


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpertsConfig:
    """`top_k` of `count` gated MLPs of `intermediate_size` channels, for each token.

    `output_scale` multiplies the result.
    """

    count: int
    top_k: int
    intermediate_size: int
    output_scale: float = 1.0


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelConfig:
    """One model; `family` names the module in `engine/models/` that builds it.

    `mixers[i]`: layer i's token mixers, which keep something in the cache: none in a pure
    feed-forward layer, one, or several in parallel. `dtype`: of weights and activations.
    `norm_offset` is added to stored norm weights. Embeddings are multiplied by `embedding_scale`,
    logits by `logits_scale`; then a logit x becomes cap * tanh(x / cap) where `logit_softcap` is
    set.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    dtype: str
    mixers: tuple[tuple[MixerConfig, ...], ...]
    mlp: MLPConfig
    experts: ExpertsConfig | None = None
    norm_offset: float = 0.0
    residual_in_fp32: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logit_softcap: float | None = None

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

    `positions` and `eps` are the family's defaults. Raises CheckpointError, also for quantized
    checkpoints: tensors are read as they are stored.
    """
    reader.require_one_of("quantization_config", [])
    return ModelConfig(
        vocab_size=reader.require("vocab_size", int),
        hidden_size=reader.require("hidden_size", int),
        max_position_embeddings=reader.get("max_position_embeddings", int, positions),
        tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
        dtype=reader.get("dtype", str, reader.get("torch_dtype", str, "float32")),
        **{"rms_norm_eps": reader.get("rms_norm_eps", float, eps), **own},
    )


def read_mlp(reader: ConfigReader) -> MLPConfig:
    """Size and bias of the feed-forward blocks under their common names."""
    return MLPConfig(
        intermediate_size=reader.require("intermediate_size", int),
        bias=reader.get("mlp_bias", bool, False),
    )
