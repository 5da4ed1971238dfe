"""Settings of Qwen3.5 dense text models, bare or inside the vision-language wrapper. Torch-free."""

from dataclasses import replace

from engine.model_configs.attention import FULL, read_attention, read_layer_types
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.gated_delta_net import read_gated_delta_net
from engine.model_configs.model_config import MixerConfig, ModelConfig, read_mlp, read_model

LINEAR = "linear_attention"


def read(reader: ConfigReader) -> ModelConfig:
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
        family="qwen3_5",
        positions=32768,
        eps=1e-6,
        mixers=tuple((mixers[kind],) for kind in types),
        mlp=read_mlp(text),
        norm_offset=1.0,
    )
