"""Reading config.json of the Qwen families: spellings, defaults, refusals by key and value."""

from math import log, sqrt
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.families import qwen
from engine.families.registry import config_of
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, StatePart
from engine.model_configs.attention import AttentionConfig
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.model_config import ModelConfig, renamed
from engine.model_configs.rope import ChannelScaling, RopeConfig, YarnScaling

QWEN3 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "head_dim": 32,
}
QWEN3_5 = QWEN3 | {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


def read(family: str, fields: dict[str, Any], dtype: str | None = None) -> ModelConfig:
    fields = fields | {"architectures": [f"{family}ForCausalLM"]}
    return config_of(ConfigReader(fields, "config.json"), dtype)


def rope_of(config: ModelConfig) -> RopeConfig | None:
    """Of the last layer, which has attention."""
    mixer = config.mixers[-1][0]
    assert isinstance(mixer, AttentionConfig)
    return mixer.rope


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 500000},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}},
    ],
    ids=str,
)
def test_both_spellings_of_rope(rope: dict[str, Any]) -> None:
    config = read("Qwen3", QWEN3 | rope)
    assert rope_of(config) == RopeConfig(5e5, 32)


def test_a_scaling_that_is_added_by_hand_wins() -> None:
    """As model cards tell people to stretch a model; its base stays."""
    saved = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    added = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096}
    yarn = YarnScaling(factor=4.0, original_positions=4096)
    magnitude = 1.0 + 0.1 * log(4.0)
    assert rope_of(read("Qwen3", QWEN3 | saved | added)) == RopeConfig(5e5, 32, yarn, magnitude)


def test_longrope_serves_texts_that_its_short_factors_are_for() -> None:
    scaling: dict[str, Any] = {
        "type": "longrope",
        "short_factor": [1.5] * 16,
        "long_factor": [3.0] * 16,
    }
    fields = QWEN3 | {"rope_scaling": scaling, "original_max_position_embeddings": 4096}
    with pytest.raises(CheckpointError, match=r"131072 to 4096, and 'factor' to 32\.0"):
        read("Qwen3", fields | {"max_position_embeddings": 131072})
    scaling["factor"] = 32.0
    rope = rope_of(read("Qwen3", fields | {"max_position_embeddings": 4096}))
    magnitude = sqrt(1.0 + log(32.0) / log(4096))
    assert rope == RopeConfig(1e4, 32, ChannelScaling((1.5,) * 16), magnitude)
    ones = {"original_max_position_embeddings": 1, "max_position_embeddings": 1}
    short = RopeConfig(1e4, 32, ChannelScaling((1.5,) * 16))
    assert rope_of(read("Qwen3", fields | ones)) == short


def test_dtype_has_two_spellings_and_may_be_overridden() -> None:
    assert read("Qwen3", QWEN3 | {"dtype": "bfloat16"}).dtype == "bfloat16"
    fields = QWEN3 | {"torch_dtype": "bfloat16"}
    assert read("Qwen3", fields).dtype == "bfloat16"
    assert read("Qwen3", fields, "float32").dtype == "float32"


def test_every_fourth_layer_of_qwen3_5_is_attention_and_states_are_float32() -> None:
    config = read("Qwen3_5", QWEN3_5 | {"dtype": "bfloat16"})
    state = MambaSpec("gated_delta_net", (StatePart((3, 160), "bfloat16"), StatePart((4, 16, 24))))
    attention = FullAttentionSpec(2, 32, "bfloat16")
    assert config.layer_specs == ((state,), (state,), (state,), (attention,))
    assert rope_of(config) == RopeConfig(1e4, 8)


def test_the_wrapper_is_read_through_its_text_config() -> None:
    wrapped = {"text_config": QWEN3_5, "tie_word_embeddings": True, "dtype": "float16"}
    config = read("Qwen3_5", wrapped)
    assert (config.tie_word_embeddings, config.dtype, config.hidden_size) == (True, "float16", 64)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("Qwen3", {"hidden_act": "gelu"}),
        ("Qwen3", {"attention_bias": True}),
        ("Qwen3", {"use_sliding_window": True}),
        ("Qwen3", {"layer_types": ["sliding_attention"] * 4}),
        ("Qwen3", {"layer_types": [["full_attention"]] * 4}),
        ("Qwen3", {"rope_parameters": {"rope_type": "proportional"}}),
        ("Qwen3", {"rope_scaling": {"type": "su", "factor": 2.0}}),
        ("Qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
        ("Qwen3", {"rope_scaling": {"factor": 0.0, "type": "linear"}}),
        ("Qwen3", {"rope_scaling": {"high_freq_factor": 1, "low_freq_factor": 1, **LLAMA3}}),
        ("Qwen3", {"quantization_config": {"quant_method": "awq"}}),
        ("Qwen3", {"dtype": "int8"}),
        ("Qwen3_5", {"attn_output_gate": False}),
        ("Qwen3_5", {"output_gate_type": "sigmoid"}),
        ("Qwen3_5", {"layer_types": ["linear_attention"] * 3}),
        ("Qwen3_5", {"layer_types": ["sliding_attention"] * 4}),
        ("Qwen3_5", {"layer_types": [["full_attention"]] * 4}),
        ("Qwen3_5", {"full_attention_interval": 0}),
        ("Qwen3_5", {"linear_num_value_heads": 3}),
        ("Qwen3_5", {"partial_rotary_factor": 0.01}),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused_by_name(kind: str, extra: dict[str, Any]) -> None:
    base = QWEN3 if kind == "Qwen3" else QWEN3_5
    key, value = next(iter(extra.items()))
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
    with pytest.raises(CheckpointError) as error:
        read(kind, base | extra)
    assert str(value).strip("[]") in str(error.value) or key in str(error.value)


def test_names_of_wrapped_checkpoints() -> None:
    names = {
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.visual.patch_embed.proj.weight": None,
        "mtp.fc.weight": None,
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: renamed(name, qwen.RENAMES) for name in names} == names
