"""Settings of GraniteMoeHybrid: Mamba2 and attention layers, dense or with experts."""

from dataclasses import dataclass, replace
from typing import Self

from engine.errors import CheckpointError
from engine.kv_cache.spec import LayerSpec
from engine.model_configs.attention import AttentionConfig, read_attention
from engine.model_configs.base import ConfigReader
from engine.model_configs.checks import compute_dtype, reject_quantization, require_one_of
from engine.model_configs.experts import ExpertsConfig
from engine.model_configs.hybrid import HybridConfig
from engine.model_configs.mamba2 import read_mamba2, read_temporal_dtype
from engine.model_configs.rope import read_rope

MAMBA = ("mamba", "linear_attention")
ATTENTION = ("attention", "full_attention")


@dataclass(slots=True, frozen=True, kw_only=True)
class GraniteMoeHybridConfig(HybridConfig):
    """Architecture GraniteMoeHybridForCausalLM; `experts` is None for dense models.

    The shared MLP has `intermediate_size` channels. `residual_scale` multiplies what mixers and
    feed-forward blocks add to the residual.
    """

    intermediate_size: int
    experts: ExpertsConfig | None
    residual_scale: float

    @classmethod
    def from_reader(cls, reader: ConfigReader, dtype: str | None = None) -> Self:
        """Reads config.json; `dtype` overrides the file's.

        Raises CheckpointError for unsupported settings.
        """
        _check(reader)
        dtype = compute_dtype(reader, dtype)
        is_mamba = _mamba_layers(reader)
        scale = reader.get("residual_multiplier", float, 1.0)
        mamba = replace(read_mamba2(reader), output_scale=scale) if any(is_mamba) else None
        attention = _attention(reader, scale)
        kv: LayerSpec = attention.spec(dtype)
        state = mamba.spec(dtype, read_temporal_dtype(reader)) if mamba else kv
        return cls(
            architecture="GraniteMoeHybridForCausalLM",
            vocab_size=reader.require("vocab_size", int),
            hidden_size=reader.require("hidden_size", int),
            num_layers=len(is_mamba),
            max_position_embeddings=reader.get("max_position_embeddings", int, 2048),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
            rms_norm_eps=reader.get("rms_norm_eps", float, 1e-6),
            dtype=dtype,
            layer_specs=tuple((state if recurrent else kv,) for recurrent in is_mamba),
            mamba=mamba,
            attention=attention,
            embedding_scale=reader.get("embedding_multiplier", float, 1.0),
            logits_scale=1.0 / reader.get("logits_scaling", float, 1.0),
            intermediate_size=reader.get("shared_intermediate_size", int, 1024),
            experts=_experts(reader),
            residual_scale=scale,
        )


def _check(reader: ConfigReader) -> None:
    reject_quantization(reader)
    require_one_of(reader, "hidden_act", ["silu"])
    require_one_of(reader, "normalization_function", ["rmsnorm"])
    require_one_of(reader, "position_embedding_type", ["nope", "rope"])
    require_one_of(reader, "partial_rotary_factor", [1.0])
    if reader.get("logits_scaling", float, 1.0) == 0.0:
        raise CheckpointError(f"{reader.source}: 'logits_scaling' is 0; logits are divided by it")


def _mamba_layers(reader: ConfigReader) -> tuple[bool, ...]:
    count = reader.require("num_hidden_layers", int)
    names = reader.get("layers_block_type", list, [MAMBA[0]] * count)
    names = reader.get("layer_types", list, names)
    if len(names) != count or not all(name in (*MAMBA, *ATTENTION) for name in names):
        raise CheckpointError(
            f"{reader.source}: 'layer_types' {names!r} must name {count} layers, "
            f"each one of {', '.join((*MAMBA, *ATTENTION))}"
        )
    return tuple(name in MAMBA for name in names)


def _attention(reader: ConfigReader, residual_scale: float) -> AttentionConfig:
    attention = read_attention(reader)
    rotated = reader.get("position_embedding_type", str, "nope") == "rope"
    return replace(
        attention,
        scale=reader.get("attention_multiplier", float, 1.0),
        rope=read_rope(reader, attention.head_dim) if rotated else None,
        output_scale=residual_scale,
    )


def _experts(reader: ConfigReader) -> ExpertsConfig | None:
    count = reader.get("num_local_experts", int, 8)
    if count == 0:
        return None
    top_k = reader.get("num_experts_per_tok", int, 2)
    if not 0 < top_k <= count:
        raise CheckpointError(
            f"{reader.source}: 'num_experts_per_tok' is {top_k} of {count} 'num_local_experts'"
        )
    return ExpertsConfig(count, top_k, reader.require("intermediate_size", int))
