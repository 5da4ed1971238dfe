"""Settings of Qwen3.5 dense text models, bare or inside the vision-language wrapper. Torch-free."""

from dataclasses import dataclass
from typing import Self

from engine.errors import CheckpointError
from engine.kv_cache.spec import FullAttentionSpec, LayerSpec, MambaSpec
from engine.model_configs.base import ConfigReader, ModelConfig
from engine.model_configs.checks import compute_dtype, reject_quantization, require_one_of
from engine.model_configs.rope import RopeConfig, read_rope

LINEAR = "linear_attention"
FULL = "full_attention"
PARTIAL_ROTARY = 0.25
FULL_ATTENTION_INTERVAL = 4


@dataclass(slots=True, frozen=True)
class GatedDeltaNetShape:
    """Sizes of one mixer; consecutive value heads share a key head."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float

    @property
    def keys(self) -> int:
        """Channels of all keys (and of all queries)."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values (and of the gate)."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels that pass the convolution: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(slots=True, frozen=True, kw_only=True)
class Qwen3_5Config(ModelConfig):
    """Architectures Qwen3_5ForCausalLM and Qwen3_5ForConditionalGeneration (text part)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig
    layer_types: tuple[str, ...]
    delta_net: GatedDeltaNetShape

    @classmethod
    def from_reader(cls, reader: ConfigReader, dtype: str | None = None) -> Self:
        """Reads config.json; `dtype` overrides the file's.

        Raises CheckpointError for unsupported settings.
        """
        reject_quantization(reader)
        wrapped = "text_config" in reader.fields
        text = reader.section("text_config") if wrapped else reader
        _check(text)
        dtype = compute_dtype(text, dtype or reader.get("dtype", str, None))
        heads = text.require("num_attention_heads", int)
        kv_heads = text.get("num_key_value_heads", int, heads)
        head_dim = text.get("head_dim", int, text.require("hidden_size", int) // heads)
        shape = _delta_net(text)
        layer_types = _layer_types(text)
        attention = FullAttentionSpec(kv_heads, head_dim, dtype)
        specs: dict[str, LayerSpec] = {LINEAR: _state(shape, dtype), FULL: attention}
        tied = text.get("tie_word_embeddings", bool, False)
        return cls(
            architecture=f"Qwen3_5For{'ConditionalGeneration' if wrapped else 'CausalLM'}",
            vocab_size=text.require("vocab_size", int),
            hidden_size=shape.hidden,
            num_layers=len(layer_types),
            max_position_embeddings=text.get("max_position_embeddings", int, 32768),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, tied),
            rms_norm_eps=shape.eps,
            dtype=dtype,
            layer_specs=tuple((specs[kind],) for kind in layer_types),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=text.require("intermediate_size", int),
            rope=read_rope(text, head_dim, PARTIAL_ROTARY),
            layer_types=layer_types,
            delta_net=shape,
        )


def _check(text: ConfigReader) -> None:
    reject_quantization(text)
    require_one_of(text, "model_type", ["qwen3_5_text"])
    require_one_of(text, "hidden_act", ["silu"])
    require_one_of(text, "attention_bias", [False])
    require_one_of(text, "attn_output_gate", [True])


def _delta_net(text: ConfigReader) -> GatedDeltaNetShape:
    shape = GatedDeltaNetShape(
        hidden=text.require("hidden_size", int),
        key_heads=text.require("linear_num_key_heads", int),
        value_heads=text.require("linear_num_value_heads", int),
        key_dim=text.require("linear_key_head_dim", int),
        value_dim=text.require("linear_value_head_dim", int),
        kernel=text.get("linear_conv_kernel_dim", int, 4),
        eps=text.get("rms_norm_eps", float, 1e-6),
    )
    if shape.value_heads % shape.key_heads:
        raise CheckpointError(
            f"{text.source}: linear_num_value_heads {shape.value_heads} is not a multiple of "
            f"linear_num_key_heads {shape.key_heads}"
        )
    return shape


def _state(shape: GatedDeltaNetShape, dtype: str) -> MambaSpec:
    return MambaSpec(
        kind="gated_delta_net",
        conv_shape=(shape.kernel - 1, shape.conv_channels),
        conv_dtype=dtype,
        temporal_shape=(shape.value_heads, shape.key_dim, shape.value_dim),
    )


def _layer_types(text: ConfigReader) -> tuple[str, ...]:
    count = text.require("num_hidden_layers", int)
    interval = text.get("full_attention_interval", int, FULL_ATTENTION_INTERVAL)
    default = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    types = tuple(text.get("layer_types", list, default))
    if len(types) != count or not set(types) <= {LINEAR, FULL}:
        raise CheckpointError(
            f"{text.source}: layer_types {types!r} must name {count} layers, "
            f"each {LINEAR!r} or {FULL!r}"
        )
    return types
