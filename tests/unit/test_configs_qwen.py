"""Reading config.json of the Qwen families: spellings, defaults, refusals by key and value."""

from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec
from engine.model_configs.base import ConfigReader
from engine.model_configs.qwen3 import Qwen3Config
from engine.model_configs.qwen3_5 import Qwen3_5Config
from engine.models import qwen3_5

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


def read(kind: type[Qwen3Config] | type[Qwen3_5Config], fields: dict[str, Any]) -> Any:
    return kind.from_reader(ConfigReader(fields, "config.json"))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 500000},
        {"rope_theta": 5e5, "rope_scaling": None},
    ],
    ids=str,
)
def test_both_spellings_of_rope(rope: dict[str, Any]) -> None:
    config = read(Qwen3Config, QWEN3 | rope)
    assert (config.rope.theta, config.rope.rotary_dim) == (5e5, 32)


def test_dtype_has_two_spellings_and_may_be_overridden() -> None:
    assert read(Qwen3Config, QWEN3 | {"dtype": "bfloat16"}).dtype == "bfloat16"
    fields = QWEN3 | {"torch_dtype": "bfloat16"}
    assert read(Qwen3Config, fields).dtype == "bfloat16"
    assert Qwen3Config.from_reader(ConfigReader(fields, "x"), "float32").dtype == "float32"


def test_every_fourth_layer_of_qwen3_5_is_attention_and_states_are_float32() -> None:
    config = read(Qwen3_5Config, QWEN3_5 | {"dtype": "bfloat16"})
    state = MambaSpec("gated_delta_net", (3, 160), "bfloat16", (4, 16, 24), "float32")
    attention = FullAttentionSpec(2, 32, "bfloat16")
    assert config.layer_specs == ((state,), (state,), (state,), (attention,))
    assert config.rope.rotary_dim == 8


def test_the_wrapper_is_read_through_its_text_config() -> None:
    wrapped = {"text_config": QWEN3_5, "tie_word_embeddings": True, "dtype": "float16"}
    config = read(Qwen3_5Config, wrapped)
    assert config.architecture == "Qwen3_5ForConditionalGeneration"
    assert (config.tie_word_embeddings, config.dtype, config.hidden_size) == (True, "float16", 64)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (Qwen3Config, {"hidden_act": "gelu"}),
        (Qwen3Config, {"attention_bias": True}),
        (Qwen3Config, {"use_sliding_window": True}),
        (Qwen3Config, {"layer_types": ["sliding_attention"] * 4}),
        (Qwen3Config, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        (Qwen3Config, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (Qwen3Config, {"quantization_config": {"quant_method": "fp8"}}),
        (Qwen3Config, {"dtype": "int8"}),
        (Qwen3_5Config, {"attn_output_gate": False}),
        (Qwen3_5Config, {"layer_types": ["linear_attention"] * 3}),
        (Qwen3_5Config, {"layer_types": ["sliding_attention"] * 4}),
        (Qwen3_5Config, {"linear_num_value_heads": 3}),
        (Qwen3_5Config, {"partial_rotary_factor": 0.01}),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused_by_name(
    kind: type[Qwen3Config] | type[Qwen3_5Config], extra: dict[str, Any]
) -> None:
    base = QWEN3 if kind is Qwen3Config else QWEN3_5
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
    assert {name: qwen3_5.rename(name) for name in names} == names
