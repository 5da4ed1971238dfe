"""Settings of Qwen3.5 dense text models, bare or inside the vision-language wrapper. Torch-free."""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.gated_delta_net import read_gated_delta_net
from engine.model_configs.model_config import MixerConfig, MLPConfig, ModelConfig, read_model
from engine.model_configs.rope import read_rope

LINEAR = "linear_attention"
FULL = "full_attention"
PARTIAL_ROTARY = 0.25
FULL_ATTENTION_INTERVAL = 4


def read(reader: ConfigReader, dtype: str | None = None) -> ModelConfig:
    """Reads config.json; `dtype` overrides the file's. Raises CheckpointError if unsupported."""
    reader.reject_quantization()
    text = reader.section("text_config") if "text_config" in reader.fields else reader
    _check(text)
    attention = read_attention(text)
    rope = read_rope(text, attention.head_dim, PARTIAL_ROTARY)
    mixers: dict[str, MixerConfig] = {
        LINEAR: read_gated_delta_net(text),
        FULL: replace(attention, rope=rope, qk_norm=True, gated=True),
    }
    # The wrapper's own value wins over that of its text part.
    tied = text.get("tie_word_embeddings", bool, False)
    return read_model(
        text,
        family="qwen3_5",
        positions=32768,
        eps=1e-6,
        tie_word_embeddings=reader.get("tie_word_embeddings", bool, tied),
        dtype=text.compute_dtype(dtype or reader.get("dtype", str, None)),
        mixers=tuple((mixers[kind],) for kind in _layer_types(text)),
        mlp=MLPConfig(intermediate_size=text.require("intermediate_size", int)),
        norm_offset=1.0,
    )


def _check(text: ConfigReader) -> None:
    text.reject_quantization()
    text.require_one_of("model_type", ["qwen3_5_text"])
    text.require_one_of("hidden_act", ["silu"])
    text.require_one_of("attention_bias", [False])
    text.require_one_of("attn_output_gate", [True])


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
