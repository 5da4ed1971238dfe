"""Settings of Qwen3 (dense, full attention in every layer). Torch-free."""

from dataclasses import replace

from engine.model_configs.attention import FULL, read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.model_config import ModelConfig, read_mlp, read_model


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("attention_bias", [False])
    reader.require_one_of("use_sliding_window", [False])
    count = reader.require("num_hidden_layers", int)
    reader.layer_types([FULL] * count, [FULL])
    attention = replace(read_attention(reader, rotary=1.0), qk_norm=True)
    return read_model(
        reader,
        family="qwen3",
        positions=32768,
        eps=1e-6,
        mixers=((attention,),) * count,
        mlp=read_mlp(reader),
    )
