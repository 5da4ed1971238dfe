"""Dense Qwen text models: a mixer, then an MLP, in every layer.

Qwen3 has full attention in every layer; Qwen3.5 has gated delta net layers with a full-attention
layer now and then, bare or inside the vision-language wrapper.
"""

from dataclasses import replace

from engine.model_configs.attention import FULL, read_attention, read_layer_types
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import read_mlp
from engine.model_configs.model_config import (
    ModelConfig,
    NamedPart,
    Renames,
    decoder_layer,
    read_model,
)
from engine.model_configs.recurrent import read_gated_delta_net

LINEAR = "linear_attention"
RENAMES: Renames = (
    (r"^mtp\.|^(model\.)?visual\.|rotary_emb\.inv_freq$", None),
    (r"^model\.language_model\.", "model."),
)


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
        positions=32768,
        eps=1e-6,
        layers=(decoder_layer([("self_attn", attention)], [("mlp", read_mlp(reader))]),) * count,
        renames=RENAMES,
    )


def read_qwen3_5(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    text = reader.text_part()
    text.require_one_of("model_type", ["qwen3_5_text"])
    text.require_one_of("hidden_act", ["silu"])
    text.require_one_of("attention_bias", [False])
    text.require_one_of("attn_output_gate", [True])
    attention = read_attention(text, rotary=0.25)
    mixers: dict[str, NamedPart] = {
        LINEAR: ("linear_attn", read_gated_delta_net(text)),
        FULL: ("self_attn", replace(attention, qk_norm=True, gated=True)),
    }
    mlp = ("mlp", read_mlp(text))
    types = read_layer_types(text, LINEAR, key="full_attention_interval", interval=4)
    return read_model(
        text,
        positions=32768,
        eps=1e-6,
        layers=tuple(decoder_layer([mixers[kind]], [mlp]) for kind in types),
        renames=RENAMES,
        norm_offset=1.0,
    )
