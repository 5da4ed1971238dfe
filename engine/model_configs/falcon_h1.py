"""Settings of Falcon-H1: attention and Mamba2 side by side in every layer, many multipliers."""

from dataclasses import dataclass, replace
from typing import Self

from engine.model_configs.attention import AttentionConfig, read_attention
from engine.model_configs.base import ConfigReader
from engine.model_configs.checks import compute_dtype, reject_quantization, require_one_of
from engine.model_configs.hybrid import HybridConfig
from engine.model_configs.mamba2 import (
    Gating,
    Mamba2Config,
    read_mamba2,
    read_temporal_dtype,
)
from engine.model_configs.rope import read_rope


@dataclass(slots=True, frozen=True, kw_only=True)
class FalconH1Config(HybridConfig):
    """Architecture FalconH1ForCausalLM.

    `mlp_scales` multiply the MLP's gate projection and its result.
    """

    intermediate_size: int
    mlp_bias: bool
    mlp_scales: tuple[float, ...]

    @classmethod
    def from_reader(cls, reader: ConfigReader, dtype: str | None = None) -> Self:
        """Reads config.json; `dtype` overrides the file's.

        Raises CheckpointError for unsupported settings.
        """
        _check(reader)
        dtype = compute_dtype(reader, dtype)
        layers = reader.require("num_hidden_layers", int)
        mamba, attention = _mamba(reader), _attention(reader)
        both = (attention.spec(dtype), mamba.spec(dtype, read_temporal_dtype(reader)))
        return cls(
            architecture="FalconH1ForCausalLM",
            vocab_size=reader.require("vocab_size", int),
            hidden_size=reader.require("hidden_size", int),
            num_layers=layers,
            max_position_embeddings=reader.get("max_position_embeddings", int, 8192),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
            rms_norm_eps=reader.get("rms_norm_eps", float, 1e-5),
            dtype=dtype,
            layer_specs=(both,) * layers,
            mamba=mamba,
            attention=attention,
            embedding_scale=reader.get("embedding_multiplier", float, 1.0),
            logits_scale=reader.get("lm_head_multiplier", float, 1.0),
            intermediate_size=reader.require("intermediate_size", int),
            mlp_bias=reader.get("mlp_bias", bool, False),
            mlp_scales=reader.numbers("mlp_multipliers", 2, 1.0),
        )


def _check(reader: ConfigReader) -> None:
    reject_quantization(reader)
    require_one_of(reader, "hidden_act", ["silu"])
    require_one_of(reader, "mamba_use_mlp", [True])
    require_one_of(reader, "partial_rotary_factor", [1.0])


def _mamba(reader: ConfigReader) -> Mamba2Config:
    expanded = "mamba_d_ssm" in reader.fields and reader.fields["mamba_d_ssm"] is None
    return replace(
        read_mamba2(reader, None if expanded else "mamba_d_ssm"),
        out_proj_bias=reader.get("projectors_bias", bool, False),
        gating=_gating(reader),
        input_scale=reader.get("ssm_in_multiplier", float, 1.0),
        projected_scales=reader.numbers("ssm_multipliers", 5, 1.0),
        output_scale=reader.get("ssm_out_multiplier", float, 1.0),
    )


def _gating(reader: ConfigReader) -> Gating:
    if not reader.get("mamba_rms_norm", bool, False):
        return Gating.GATE_ONLY
    if reader.get("mamba_norm_before_gate", bool, True):
        return Gating.NORM_THEN_GATE
    return Gating.GATE_THEN_NORM


def _attention(reader: ConfigReader) -> AttentionConfig:
    attention = read_attention(reader)
    return replace(
        attention,
        # Keys are multiplied by it before they are rotated; scores can be, just as well.
        scale=attention.scale * reader.get("key_multiplier", float, 1.0),
        rope=read_rope(reader, attention.head_dim),
        input_scale=reader.get("attention_in_multiplier", float, 1.0),
        output_scale=reader.get("attention_out_multiplier", float, 1.0),
    )
