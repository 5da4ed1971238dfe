"""Reading config.json of hybrid families: spellings, defaults, refusals."""

from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.families import gemma3, granite_moe_hybrid
from engine.families.gemma3 import SLIDING
from engine.families.registry import config_of
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec, StatePart
from engine.model_configs.attention import FULL, AttentionConfig, QKNorm
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig, RouterConfig
from engine.model_configs.model_config import ModelConfig, renamed
from engine.model_configs.recurrent import GatedDeltaNetConfig, Gating, Mamba2Config
from engine.model_configs.rope import LinearScaling, RopeConfig

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
# As published for the 7B model, with smaller sizes.
OLMO_HYBRID = SIZES | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 57,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_a_log_max": 16.0,
    "linear_a_log_min": 0.0,
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "linear_dt_init_floor": 0.0001,
    "linear_dt_max": 0.1,
    "linear_dt_min": 0.001,
    "linear_key_head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_use_gate": True,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 65536,
    "model_type": "olmo_hybrid",
    "pad_token_id": 77,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.3.0",
    "use_cache": True,
}
# As published for the first model, with smaller sizes.
JAMBA = SIZES | {
    "attention_dropout": 0.0,
    "attn_layer_offset": 2,
    "attn_layer_period": 4,
    "bos_token_id": 1,
    "calc_logits_for_entire_prompt": False,
    "eos_token_id": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 4,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "model_type": "jamba",
    "n_ctx": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "use_mamba_kernels": True,
}


def read(family: str, fields: dict[str, Any]) -> ModelConfig:
    fields = fields | {"architectures": [f"{family}ForCausalLM"]}
    return config_of(ConfigReader(fields, "config.json"), None)


def attention_of(config: ModelConfig) -> AttentionConfig:
    """Of the first layer that has any."""
    mixers = [mixer for own in config.mixers for mixer in own]
    return next(mixer for mixer in mixers if isinstance(mixer, AttentionConfig))


def mamba_of(config: ModelConfig) -> Mamba2Config:
    """Of the first layer that has any."""
    mixers = [mixer for own in config.mixers for mixer in own]
    return next(mixer for mixer in mixers if isinstance(mixer, Mamba2Config))


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
    config = read("Gemma3", {"text_config": text, "torch_dtype": "bfloat16"})
    assert (config.vocab_size, config.tie_word_embeddings) == (262_208, True)
    near, far = config.mixers[0][0], config.mixers[5][0]
    assert isinstance(near, AttentionConfig)
    assert isinstance(far, AttentionConfig)
    assert (near.rope, far.rope) == (RopeConfig(1e4, 256), RopeConfig(1e6, 256, LinearScaling(8.0)))
    assert near.scale == far.scale == 1 / 16
    sliding, full = config.groups
    assert sliding.spec == SlidingWindowSpec(4, 256, "bfloat16", 1024)
    assert full.spec == FullAttentionSpec(4, 256, "bfloat16")
    assert full.layers == (5, 11, 17, 23, 29)


def test_both_spellings_of_gemma3_mean_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "sliding_window_pattern": 2}
    ropes = {SLIDING: {"rope_theta": 5e3}, FULL: {"rope_type": "default", "rope_theta": 5e5}}
    new = {"rope_parameters": ropes, "layer_types": [SLIDING, FULL] * 2}
    assert read("Gemma3", GEMMA3 | old) == read("Gemma3", GEMMA3 | new)


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
    assert {name: renamed(name, gemma3.RENAMES) for name in names} == names


def test_a_layer_of_falcon_h1_is_in_two_groups() -> None:
    config = read("FalconH1", FALCON_H1 | {"dtype": "bfloat16"})
    assert [group.spec for group in config.groups] == [
        FullAttentionSpec(2, 16, "bfloat16"),
        MambaSpec("mamba2", (StatePart((3, 160), "bfloat16"), StatePart((8, 12, 16)))),
    ]
    assert [group.layers for group in config.groups] == [(0, 1, 2, 3)] * 2
    assert attention_of(config).scale == 0.125


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
    assert mamba_of(read("FalconH1", FALCON_H1 | fields)).gating is gating


def test_the_channels_of_falcon_h1_may_follow_from_the_hidden_size() -> None:
    config = read("FalconH1", FALCON_H1 | {"mamba_d_ssm": None, "mamba_d_head": "auto"})
    assert mamba_of(config).inner_size == 2 * 64
    assert renamed("model.layers.0.mamba.mup_vector", config.renames) is None


def test_both_spellings_of_granite_layers_mean_the_same() -> None:
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    new = [names[kind] for kind in GRANITE["layer_types"]]
    hub = read("GraniteMoeHybrid", GRANITE)
    assert read("GraniteMoeHybrid", GRANITE | {"layer_types": new}) == hub
    assert [group.layers for group in hub.groups] == [(0, 2, 3), (1,)]
    assert attention_of(hub).rope is None
    assert hub.layers[1][1].parts == (("shared_mlp", MLPConfig(intermediate_size=80)),)


def test_a_granite_without_mamba_layers_needs_no_mamba_sizes() -> None:
    fields = SIZES | {"layer_types": ["attention"] * 4, "mamba_n_heads": 7}
    config = read("GraniteMoeHybrid", fields | {"position_embedding_type": "rope"})
    assert all(isinstance(mixer, AttentionConfig) for (mixer,) in config.mixers)
    assert attention_of(config).rope == RopeConfig(1e4, 16)
    experts = dict(config.layers[0][1].parts)["block_sparse_moe"]
    assert isinstance(experts, ExpertsConfig)
    assert (experts.router.count, experts.router.top_k) == (8, 2)


def test_expert_tensors_of_granite_may_have_the_names_of_the_hub() -> None:
    prefix = "model.layers.1.block_sparse_moe"
    name = f"{prefix}.experts.gate_up_proj"
    for stored in (name, f"{prefix}.input_linear.weight"):
        assert renamed(stored, granite_moe_hybrid.RENAMES) == name


def test_bamba_rotates_half_of_each_head() -> None:
    config = read("Bamba", BAMBA)
    assert attention_of(config).rope == RopeConfig(1e4, 8)
    assert [group.layers for group in config.groups] == [(0, 2, 3), (1,)]


def test_olmo_hybrid_as_published() -> None:
    config = read("OlmoHybrid", OLMO_HYBRID)
    attention, delta = attention_of(config), config.mixers[0][0]
    assert (attention.rope, attention.qk_norm) == (None, QKNorm.ALL_HEADS)
    assert isinstance(delta, GatedDeltaNetConfig)
    assert (delta.beta_scale, delta.norm_eps, config.rms_norm_eps) == (2.0, 1e-5, 1e-6)
    assert [(block.norm, block.post_norm) for block in config.layers[3]] == [
        (None, "post_attention_layernorm"),
        (None, "post_feedforward_layernorm"),
    ]
    left_out = {key: None for key in OLMO_HYBRID if key.startswith("linear_")}
    assert read("OlmoHybrid", OLMO_HYBRID | left_out) == config
    rotated = read("OlmoHybrid", OLMO_HYBRID | {"rope_parameters": {"rope_theta": 5e5}})
    assert attention_of(rotated).rope == RopeConfig(5e5, 16, wide=True)
    older = OLMO_HYBRID | {"rope_parameters": None, "rope_theta": None}
    assert read("OlmoHybrid", older) == config


def test_jamba_as_published() -> None:
    config = read("Jamba", JAMBA)
    assert [group.spec for group in config.groups] == [
        MambaSpec("mamba1", (StatePart((3, 128), "bfloat16"), StatePart((16, 128)))),
        FullAttentionSpec(2, 16, "bfloat16"),
    ]
    assert [group.layers for group in config.groups] == [(0, 1, 3), (2,)]
    assert attention_of(config).rope is None
    dense, sparse = (dict(config.layers[layer][1].parts)["feed_forward"] for layer in (0, 1))
    router = RouterConfig(count=16, top_k=2, renormalise=False)
    assert dense == MLPConfig(intermediate_size=96)
    assert sparse == ExpertsConfig(router=router, intermediate_size=96)
    assert read("Jamba", JAMBA | {"mamba_dt_rank": "auto"}) == config
    small = read("Jamba", JAMBA | {"num_experts": 1, "num_experts_per_tok": 2})
    assert {dict(layer[1].parts)["feed_forward"] for layer in small.layers} == {dense}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("Gemma3", {"hidden_activation": "silu"}),
    ("Gemma3", {"attention_bias": True}),
    ("Gemma3", {"attn_logit_softcapping": 50.0}),
    ("Gemma3", {"use_bidirectional_attention": True}),
    ("Gemma3", {"sliding_window": 0}),
    ("Gemma3", {"final_logit_softcapping": 0.0}),
    ("Gemma3", {"query_pre_attn_scalar": 0}),
    ("Gemma3", {"num_key_value_heads": 3}),
    ("Gemma3", {"layer_types": ["linear_attention"] * 4}),
    ("Gemma3", {"sliding_window_pattern": 0}),
    ("Gemma3", {"rope_scaling": {"rope_type": "proportional"}}),
    ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 0}}),
    ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": None}}),
    ("Gemma3", {"rope_parameters": {"rope_theta": 1e6}}),
    ("Gemma3", {"quantization_config": {"quant_method": "gptq"}}),
    ("GraniteMoeHybrid", {"hidden_act": "gelu"}),
    ("GraniteMoeHybrid", {"normalization_function": "layernorm"}),
    ("GraniteMoeHybrid", {"position_embedding_type": "alibi"}),
    ("GraniteMoeHybrid", {"logits_scaling": 0}),
    ("GraniteMoeHybrid", {"layer_types": ["mamba"] * 3}),
    ("GraniteMoeHybrid", {"num_experts_per_tok": 9, "num_local_experts": 8}),
    ("GraniteMoeHybrid", {"mamba_d_head": 64}),
    ("FalconH1", {"mamba_use_mlp": False}),
    ("FalconH1", {"mlp_multipliers": [1.0]}),
    ("FalconH1", {"ssm_multipliers": [1.0, 1.0, "2", 1.0, 1.0]}),
    ("FalconH1", {"mamba_n_groups": 3}),
    ("FalconH1", {"mamba_d_ssm": 100}),
    ("FalconH1", {"mamba_d_ssm": "auto"}),
    ("FalconH1", {"rope_scaling": {"rope_type": "proportional"}}),
    ("Bamba", {"partial_rotary_factor": 0.25}),
    ("Bamba", {"attn_rotary_emb": 16}),
    ("Bamba", {"attn_layer_indices": [4]}),
    ("Bamba", {"attn_layer_indices": ["1"]}),
    ("Bamba", {"mamba_ssm_cache_dtype": "int8"}),
    ("Bamba", {"num_attention_heads": 0}),
    ("OlmoHybrid", {"hidden_act": "gelu"}),
    ("OlmoHybrid", {"linear_use_gate": False}),
    ("OlmoHybrid", {"linear_num_value_heads": 6}),
    ("OlmoHybrid", {"linear_num_key_heads": 0}),
    ("OlmoHybrid", {"layer_types": ["sliding_attention"] * 4}),
    ("OlmoHybrid", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("OlmoHybrid", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "proportional"}}),
    ("OlmoHybrid", {"rope_parameters": None}),
    ("Jamba", {"hidden_act": "gelu"}),
    ("Jamba", {"attention_bias": True}),
    ("Jamba", {"mamba_inner_layernorms": False}),
    ("Jamba", {"sliding_window": 4096}),
    ("Jamba", {"attn_layer_offset": 4}),
    ("Jamba", {"expert_layer_period": 0}),
    ("Jamba", {"num_experts_per_tok": 17}),
    ("Jamba", {"mamba_dt_rank": "full"}),
]
BASES: dict[str, dict[str, Any]] = {
    "Gemma3": GEMMA3,
    "GraniteMoeHybrid": GRANITE,
    "FalconH1": FALCON_H1,
    "Bamba": BAMBA,
    "OlmoHybrid": OLMO_HYBRID,
    "Jamba": JAMBA,
}


@pytest.mark.parametrize(
    ("kind", "extra"), REFUSED, ids=[f"{kind}-{extra}" for kind, extra in REFUSED]
)
def test_unsupported_settings_are_refused_by_name(kind: str, extra: dict[str, Any]) -> None:
    key, value = next(iter(extra.items()))
    if isinstance(value, dict):
        key, value = next(reversed(value.items()))
    with pytest.raises(CheckpointError) as error:
        read(kind, BASES[kind] | extra)
    assert key in str(error.value) or repr(value) in str(error.value)
