"""Reading config.json of Gemma 3, Granite, Falcon-H1 and Bamba: spellings, defaults, refusals."""

from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.kv_cache.spec import AttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from engine.model_configs.bamba import BambaConfig
from engine.model_configs.base import ConfigReader
from engine.model_configs.falcon_h1 import FalconH1Config
from engine.model_configs.gemma3 import FULL, SLIDING, Gemma3Config
from engine.model_configs.granite_moe_hybrid import GraniteMoeHybridConfig
from engine.model_configs.mamba2 import Gating
from engine.model_configs.rope import RopeConfig
from engine.models import falcon_h1, gemma3, granite_moe_hybrid

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
GEMMA3 = SIZES | {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 24}
MAMBA = SIZES | {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
GRANITE = MAMBA | {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "position_embedding_type": "nope",
}
FALCON_H1 = MAMBA | {"mamba_d_ssm": 96, "mamba_d_head": 12, "key_multiplier": 0.5}
BAMBA = MAMBA | {"attn_layer_indices": [1], "attn_rotary_emb": 8}

Config = (
    type[Gemma3Config] | type[GraniteMoeHybridConfig] | type[FalconH1Config] | type[BambaConfig]
)


def read(kind: Config, fields: dict[str, Any]) -> Any:
    return kind.from_reader(ConfigReader(fields, "config.json"))


def test_the_hub_leaves_out_what_equals_the_defaults_of_gemma3() -> None:
    """As published for the 4B model: most sizes are only in the class that reads them."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(Gemma3Config, {"text_config": text, "torch_dtype": "bfloat16"})
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert (config.vocab_size, config.tie_word_embeddings) == (262_208, True)
    assert (config.global_rope, config.local_rope) == (
        RopeConfig(1e6, 256, 8.0),
        RopeConfig(1e4, 256),
    )
    assert config.scale == 1 / 16
    sliding, full = config.groups
    assert sliding.spec == SlidingWindowSpec(4, 256, "bfloat16", 1024)
    assert full.spec == FullAttentionSpec(4, 256, "bfloat16")
    assert full.layers == (5, 11, 17, 23, 29)


def test_both_spellings_of_gemma3_mean_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "sliding_window_pattern": 2}
    ropes = {SLIDING: {"rope_theta": 5e3}, FULL: {"rope_type": "default", "rope_theta": 5e5}}
    new = {"rope_parameters": ropes, "layer_types": [SLIDING, FULL] * 2}
    assert read(Gemma3Config, GEMMA3 | old) == read(Gemma3Config, GEMMA3 | new)


def test_names_of_wrapped_gemma3_checkpoints() -> None:
    norm = "model.layers.0.input_layernorm.weight"
    names = {
        norm: norm,
        f"language_model.{norm}": norm,
        "model.language_model.layers.0.input_layernorm.weight": norm,
        "language_model.lm_head.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
        "vision_tower.vision_model.post_layernorm.bias": None,
        "model.multi_modal_projector.mm_soft_emb_norm.weight": None,
    }
    assert {name: gemma3.rename(name) for name in names} == names


def test_a_layer_of_falcon_h1_is_in_two_groups() -> None:
    config = read(FalconH1Config, FALCON_H1 | {"dtype": "bfloat16"})
    assert [group.spec for group in config.groups] == [
        FullAttentionSpec(2, 16, "bfloat16"),
        MambaSpec("mamba2", (3, 160), "bfloat16", (8, 12, 16)),
    ]
    assert [group.layers for group in config.groups] == [(0, 1, 2, 3)] * 2
    assert (config.group_of(3, AttentionSpec), config.group_of(3, MambaSpec)) == (0, 1)
    assert config.attention.scale == 0.125


@pytest.mark.parametrize(
    ("fields", "gating"),
    [
        ({"mamba_rms_norm": False, "mamba_norm_before_gate": True}, Gating.GATE_ONLY),
        ({"mamba_rms_norm": True}, Gating.NORM_THEN_GATE),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": False}, Gating.GATE_THEN_NORM),
    ],
    ids=str,
)
def test_the_norm_of_falcon_h1_is_optional(fields: dict[str, Any], gating: Gating) -> None:
    assert read(FalconH1Config, FALCON_H1 | fields).mamba.gating is gating


def test_the_channels_of_falcon_h1_may_follow_from_the_hidden_size() -> None:
    config = read(FalconH1Config, FALCON_H1 | {"mamba_d_ssm": None, "mamba_d_head": "auto"})
    assert config.mamba.inner_size == 2 * 64
    assert falcon_h1.rename("model.layers.0.mamba.mup_vector") is None


def test_both_spellings_of_granite_layers_mean_the_same() -> None:
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    new = [names[kind] for kind in GRANITE["layer_types"]]
    hub = read(GraniteMoeHybridConfig, GRANITE)
    assert read(GraniteMoeHybridConfig, GRANITE | {"layer_types": new}) == hub
    assert [group.layers for group in hub.groups] == [(0, 2, 3), (1,)]
    assert (hub.experts, hub.attention.rope, hub.intermediate_size) == (None, None, 80)


def test_a_granite_without_mamba_layers_needs_no_mamba_sizes() -> None:
    fields = SIZES | {"layer_types": ["attention"] * 4, "mamba_n_heads": 7}
    config = read(GraniteMoeHybridConfig, fields | {"position_embedding_type": "rope"})
    assert config.mamba is None
    assert config.attention.rope == RopeConfig(1e4, 16)
    assert (config.experts.count, config.experts.top_k) == (8, 2)


def test_expert_tensors_of_granite_have_the_names_of_the_hub() -> None:
    prefix = "model.layers.1.block_sparse_moe"
    hub = f"{prefix}.input_linear.weight"
    assert granite_moe_hybrid.rename(f"{prefix}.experts.gate_up_proj") == hub
    assert granite_moe_hybrid.rename(hub) == hub


def test_bamba_rotates_half_of_each_head() -> None:
    config = read(BambaConfig, BAMBA)
    assert config.attention.rope == RopeConfig(1e4, 8)
    assert [group.layers for group in config.groups] == [(0, 2, 3), (1,)]


REFUSED: list[tuple[Config, dict[str, Any]]] = [
    (Gemma3Config, {"hidden_activation": "silu"}),
    (Gemma3Config, {"attention_bias": True}),
    (Gemma3Config, {"attn_logit_softcapping": 50.0}),
    (Gemma3Config, {"use_bidirectional_attention": True}),
    (Gemma3Config, {"sliding_window": 0}),
    (Gemma3Config, {"final_logit_softcapping": 0.0}),
    (Gemma3Config, {"query_pre_attn_scalar": 0}),
    (Gemma3Config, {"num_key_value_heads": 3}),
    (Gemma3Config, {"layer_types": ["linear_attention"] * 4}),
    (Gemma3Config, {"rope_scaling": {"rope_type": "yarn"}}),
    (Gemma3Config, {"rope_scaling": {"rope_type": "linear", "factor": 0}}),
    (Gemma3Config, {"rope_scaling": {"rope_type": "linear", "factor": None}}),
    (Gemma3Config, {"rope_parameters": {"rope_theta": 1e6}}),
    (Gemma3Config, {"quantization_config": {"quant_method": "gptq"}}),
    (GraniteMoeHybridConfig, {"hidden_act": "gelu"}),
    (GraniteMoeHybridConfig, {"normalization_function": "layernorm"}),
    (GraniteMoeHybridConfig, {"position_embedding_type": "alibi"}),
    (GraniteMoeHybridConfig, {"logits_scaling": 0}),
    (GraniteMoeHybridConfig, {"layer_types": ["mamba"] * 3}),
    (GraniteMoeHybridConfig, {"num_experts_per_tok": 9, "num_local_experts": 8}),
    (GraniteMoeHybridConfig, {"mamba_d_head": 64}),
    (FalconH1Config, {"mamba_use_mlp": False}),
    (FalconH1Config, {"mlp_multipliers": [1.0]}),
    (FalconH1Config, {"ssm_multipliers": [1.0, 1.0, "2", 1.0, 1.0]}),
    (FalconH1Config, {"mamba_n_groups": 3}),
    (FalconH1Config, {"mamba_d_ssm": 100}),
    (FalconH1Config, {"mamba_d_ssm": "auto"}),
    (FalconH1Config, {"rope_scaling": {"rope_type": "dynamic"}}),
    (BambaConfig, {"partial_rotary_factor": 0.25}),
    (BambaConfig, {"attn_rotary_emb": 16}),
    (BambaConfig, {"attn_layer_indices": [4]}),
    (BambaConfig, {"attn_layer_indices": ["1"]}),
    (BambaConfig, {"mamba_ssm_cache_dtype": "int8"}),
    (BambaConfig, {"num_attention_heads": 0}),
]
BASES: dict[Config, dict[str, Any]] = {
    Gemma3Config: GEMMA3,
    GraniteMoeHybridConfig: GRANITE,
    FalconH1Config: FALCON_H1,
    BambaConfig: BAMBA,
}


@pytest.mark.parametrize(
    ("kind", "extra"), REFUSED, ids=[f"{kind.__name__}-{extra}" for kind, extra in REFUSED]
)
def test_unsupported_settings_are_refused_by_name(kind: Config, extra: dict[str, Any]) -> None:
    key, value = next(iter(extra.items()))
    if isinstance(value, dict):
        key, value = next(reversed(value.items()))
    with pytest.raises(CheckpointError) as error:
        read(kind, BASES[kind] | extra)
    assert key in str(error.value) or repr(value) in str(error.value)
