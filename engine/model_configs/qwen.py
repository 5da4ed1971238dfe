"""Settings of dense Qwen text models. Torch-free.

Qwen3 has full attention in every layer; Qwen3.5 has gated delta net layers with a full-attention
layer now and then, bare or inside the vision-language wrapper.
"""

from dataclasses import replace

from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.mixers import (
    FULL,
    read_attention,
    read_gated_delta_net,
    read_layer_types,
)
from engine.model_configs.model_config import MixerConfig, ModelConfig, read_mlp, read_model

LINEAR = "linear_attention"


def read_qwen3(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("attention_bias", [False])
    reader.require_one_of("use_sliding_window", [False])
    count = reader.require("num_hidden_layers", int)
    reader.layer_types([FULL] * count, [FULL])
    attention = replace(read_attention(reader, rotary=1.0), qk_norm=True)
    return read_model(
        reader,
        family="qwen",
        positions=32768,
        eps=1e-6,
        mixers=((attention,),) * count,
        mlp=read_mlp(reader),
    )


def read_qwen3_5(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    text = reader.text_part()
    text.require_one_of("model_type", ["qwen3_5_text"])
    text.require_one_of("hidden_act", ["silu"])
    text.require_one_of("attention_bias", [False])
    text.require_one_of("attn_output_gate", [True])
    attention = read_attention(text, rotary=0.25)
    mixers: dict[str, MixerConfig] = {
        LINEAR: read_gated_delta_net(text),
        FULL: replace(attention, qk_norm=True, gated=True),
    }
    types = read_layer_types(text, LINEAR, key="full_attention_interval", interval=4)
    return read_model(
        text,
        family="qwen",
        positions=32768,
        eps=1e-6,
        mixers=tuple((mixers[kind],) for kind in types),
        mlp=read_mlp(text),
        norm_offset=1.0,
    )
