"""Settings of Qwen3 (dense, full attention in every layer). Torch-free."""

from dataclasses import dataclass
from typing import Self

from engine.errors import CheckpointError
from engine.kv_cache.spec import FullAttentionSpec
from engine.model_configs.base import ConfigReader, ModelConfig
from engine.model_configs.checks import compute_dtype, reject_quantization, require_one_of
from engine.model_configs.rope import RopeConfig, read_rope


@dataclass(slots=True, frozen=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """Architecture Qwen3ForCausalLM."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig

    @classmethod
    def from_reader(cls, reader: ConfigReader, dtype: str | None = None) -> Self:
        """Reads config.json; `dtype` overrides the file's.

        Raises CheckpointError for unsupported settings.
        """
        _check(reader)
        dtype = compute_dtype(reader, dtype)
        layers = reader.require("num_hidden_layers", int)
        hidden = reader.require("hidden_size", int)
        heads = reader.require("num_attention_heads", int)
        kv_heads = reader.get("num_key_value_heads", int, heads)
        head_dim = reader.get("head_dim", int, hidden // heads)
        return cls(
            architecture="Qwen3ForCausalLM",
            vocab_size=reader.require("vocab_size", int),
            hidden_size=hidden,
            num_layers=layers,
            max_position_embeddings=reader.get("max_position_embeddings", int, 32768),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
            rms_norm_eps=reader.get("rms_norm_eps", float, 1e-6),
            dtype=dtype,
            layer_specs=((FullAttentionSpec(kv_heads, head_dim, dtype),),) * layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=reader.require("intermediate_size", int),
            rope=read_rope(reader, head_dim),
        )


def _check(reader: ConfigReader) -> None:
    reject_quantization(reader)
    require_one_of(reader, "hidden_act", ["silu"])
    require_one_of(reader, "attention_bias", [False])
    require_one_of(reader, "use_sliding_window", [False])
    types = reader.get("layer_types", list, [])
    if set(types) - {"full_attention"}:
        raise CheckpointError(f"{reader.source}: layer_types {types!r} must all be full_attention")
