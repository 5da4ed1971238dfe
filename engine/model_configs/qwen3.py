"""Settings of Qwen3 (dense, full attention in every layer). Torch-free."""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.model_config import MLPConfig, ModelConfig, read_model
from engine.model_configs.rope import read_rope


def read(reader: ConfigReader, dtype: str | None = None) -> ModelConfig:
    """Reads config.json; `dtype` overrides the file's. Raises CheckpointError if unsupported."""
    _check(reader)
    attention = read_attention(reader)
    rope = read_rope(reader, attention.head_dim)
    attention = replace(attention, rope=rope, qk_norm=True)
    return read_model(
        reader,
        family="qwen3",
        positions=32768,
        eps=1e-6,
        dtype=reader.compute_dtype(dtype),
        mixers=((attention,),) * reader.require("num_hidden_layers", int),
        mlp=MLPConfig(intermediate_size=reader.require("intermediate_size", int)),
    )


def _check(reader: ConfigReader) -> None:
    reader.reject_quantization()
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("attention_bias", [False])
    reader.require_one_of("use_sliding_window", [False])
    types = reader.get("layer_types", list, [])
    if set(types) - {"full_attention"}:
        raise CheckpointError(f"{reader.source}: layer_types {types!r} must all be full_attention")
