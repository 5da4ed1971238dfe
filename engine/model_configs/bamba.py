"""Settings of Bamba: Mamba2 layers with an attention layer now and then, each with an MLP."""

from dataclasses import dataclass, replace
from typing import Self

from engine.errors import CheckpointError
from engine.model_configs.attention import AttentionConfig, read_attention
from engine.model_configs.base import ConfigReader
from engine.model_configs.checks import compute_dtype, reject_quantization, require_one_of
from engine.model_configs.hybrid import HybridConfig
from engine.model_configs.mamba2 import read_mamba2, read_temporal_dtype
from engine.model_configs.rope import read_rope

PARTIAL_ROTARY = 0.5


@dataclass(slots=True, frozen=True, kw_only=True)
class BambaConfig(HybridConfig):
    """Architecture BambaForCausalLM."""

    intermediate_size: int
    mlp_bias: bool

    @classmethod
    def from_reader(cls, reader: ConfigReader, dtype: str | None = None) -> Self:
        """Reads config.json; `dtype` overrides the file's.

        Raises CheckpointError for unsupported settings.
        """
        _check(reader)
        dtype = compute_dtype(reader, dtype)
        layers = reader.require("num_hidden_layers", int)
        attention_layers = _attention_layers(reader, layers)
        mamba, attention = read_mamba2(reader), _attention(reader)
        state, kv = mamba.spec(dtype, read_temporal_dtype(reader)), attention.spec(dtype)
        return cls(
            architecture="BambaForCausalLM",
            vocab_size=reader.require("vocab_size", int),
            hidden_size=reader.require("hidden_size", int),
            num_layers=layers,
            max_position_embeddings=reader.get("max_position_embeddings", int, 262144),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
            rms_norm_eps=reader.get("rms_norm_eps", float, 1e-5),
            dtype=dtype,
            layer_specs=tuple((kv if i in attention_layers else state,) for i in range(layers)),
            mamba=mamba,
            attention=attention,
            intermediate_size=reader.require("intermediate_size", int),
            mlp_bias=reader.get("mlp_bias", bool, False),
        )


def _check(reader: ConfigReader) -> None:
    reject_quantization(reader)
    require_one_of(reader, "hidden_act", ["silu"])
    # transformers reads this one from `rope_parameters` only, and else takes one half.
    require_one_of(reader, "partial_rotary_factor", [PARTIAL_ROTARY])


def _attention(reader: ConfigReader) -> AttentionConfig:
    attention = read_attention(reader)
    rope = read_rope(reader, attention.head_dim, PARTIAL_ROTARY)
    require_one_of(reader, "attn_rotary_emb", [rope.rotary_dim])
    return replace(attention, rope=rope)


def _attention_layers(reader: ConfigReader, count: int) -> frozenset[int]:
    found = reader.get("attn_layer_indices", list, [])
    if not all(layer in range(count) and not isinstance(layer, bool) for layer in found):
        raise CheckpointError(
            f"{reader.source}: 'attn_layer_indices' is {found!r}, expected layers below {count}"
        )
    return frozenset(found)
