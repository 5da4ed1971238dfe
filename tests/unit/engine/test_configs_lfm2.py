"""Reading config.json of LFM2 and LFM2-MoE: files as published, spellings, defaults, refusals."""

import json
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.families import lfm2
from engine.families.registry import config_of
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, StatePart
from engine.model_configs.attention import AttentionConfig
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig, RouterConfig, Scoring
from engine.model_configs.model_config import ModelConfig, renamed
from engine.model_configs.rope import RopeConfig

# As LFM2-1.2B was published in 2025, without the sizes of its MLP under their later names.
PUBLISHED = """{
  "architectures": ["Lfm2ForCausalLM"],
  "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim": 12288,
  "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
  "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true,
  "block_use_xavier_init": true, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false,
  "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": true, "eos_token_id": 7,
  "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
  "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05,
  "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
  "pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
  "transformers_version": "4.54.0", "use_cache": true, "use_pos_enc": true, "vocab_size": 65536
}"""
# LFM2-8B-A1B; its 24 layers are cut to six.
PUBLISHED_MOE = """{
  "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3,
  "conv_bias": false, "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048,
  "initializer_range": 0.02, "intermediate_size": 7168,
  "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv"],
  "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792,
  "norm_eps": 1e-05, "norm_topk_prob": true, "num_attention_heads": 32, "num_dense_layers": 2,
  "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 6, "num_key_value_heads": 8,
  "pad_token_id": 0, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
  "transformers_version": "4.56.0", "use_cache": true, "use_expert_bias": true,
  "vocab_size": 65536
}"""
LFM2: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}


def read(fields: dict[str, Any]) -> ModelConfig:
    return config_of(ConfigReader({"architectures": ["Lfm2ForCausalLM"]} | fields, "f"), None)


def mlp_size(config: ModelConfig) -> int:
    ((_, mlp),) = config.layers[0][1].parts
    assert isinstance(mlp, MLPConfig)
    return mlp.intermediate_size


def test_a_published_file() -> None:
    config = read(json.loads(PUBLISHED))
    assert config.tie_word_embeddings
    assert mlp_size(config) == 8192
    state, attention = config.groups
    assert state.spec == MambaSpec("short_conv", (StatePart((2, 2048), "bfloat16"),))
    assert attention.spec == FullAttentionSpec(8, 64, "bfloat16")
    assert attention.layers == (2, 5, 8, 10, 12, 14)
    # A state is smaller than a block of 16 tokens, and still has a unit of its own.
    plan = plan_arena(config.groups, 16, 1 << 30)
    assert (plan.state_bytes, plan.unit_bytes, plan.blocks_per_unit) == (81_920, 196_608, (1, 1))


def test_a_published_file_with_experts() -> None:
    config = read(json.loads(PUBLISHED_MOE))
    router = RouterConfig(
        count=32, top_k=4, scoring=Scoring.SIGMOID, floor=1e-6, correction_bias=True
    )
    dense, sparse = (
        MLPConfig(intermediate_size=7168),
        ExpertsConfig(router=router, intermediate_size=1792),
    )
    last = [block.parts for _, block in config.layers]
    assert last == [(("feed_forward", part),) for part in (dense,) * 2 + (sparse,) * 4]
    bias = "model.layers.2.feed_forward"
    renames = config.renames
    assert renamed(f"{bias}.expert_bias", renames) == f"{bias}.gate.e_score_correction_bias"
    assert renamed(f"{bias}.experts.3.w3.weight", renames) == f"{bias}.experts.3.up_proj.weight"
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        read(json.loads(PUBLISHED_MOE) | {"num_experts": 3})


def test_both_spellings_mean_the_same() -> None:
    old = {key: value for key, value in LFM2.items() if key != "layer_types"}
    old |= {"full_attn_idxs": [2], "rope_theta": 5e4, "tie_embedding": False}
    old |= {"block_ff_dim": 90, "norm_eps": 1e-3}
    rope = {"rope_type": "default", "rope_theta": 5e4}
    new = {"rope_parameters": rope, "tie_word_embeddings": False, "norm_eps": 1e-3}
    assert read(old) == read(LFM2 | new | {"intermediate_size": 90})


def test_defaults_are_those_of_transformers() -> None:
    config = read({key: value for key, value in LFM2.items() if key != "layer_types"})
    mixers = [mixer for (mixer,) in config.mixers]
    assert all(isinstance(it, AttentionConfig) and it.rope == RopeConfig(1e6, 16) for it in mixers)
    assert config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 256),
        ({"block_multiple_of": 10}, 70),
        ({"block_multiple_of": 7, "block_ffn_dim_multiplier": 1.3}, 91),
        ({"block_auto_adjust_ff_dim": False}, 100),
    ],
    ids=str,
)
def test_the_size_of_the_mlp_may_be_adjusted(fields: dict[str, Any], size: int) -> None:
    """66 of 100, times 1.3 is 85, and 91 is the next multiple of 7."""
    assert mlp_size(read(LFM2 | fields)) == size


def test_names_of_tensors() -> None:
    layer = "model.layers.2"
    names = {
        "model.embedding_norm.weight": "model.norm.weight",
        f"{layer}.self_attn.out_proj.weight": f"{layer}.self_attn.o_proj.weight",
        f"{layer}.self_attn.k_layernorm.weight": f"{layer}.self_attn.k_norm.weight",
        f"{layer}.feed_forward.w2.weight": f"{layer}.feed_forward.down_proj.weight",
        f"{layer}.conv.out_proj.weight": f"{layer}.conv.out_proj.weight",
    }
    assert {name: renamed(name, lfm2.RENAMES) for name in names} == names


REFUSED: list[dict[str, Any]] = [
    {"attention_bias": True},
    {"block_dim": 32},
    {"conv_dim": 32},
    {"conv_dim_out": 32},
    {"block_use_swiglu": False},
    {"use_pos_enc": False},
    {"conv_L_cache": 1},
    {"block_multiple_of": 0},
    {"layer_types": ["conv"] * 3},
    {"layer_types": ["mamba"] * 4},
    {"full_attn_idxs": [4], "layer_types": None},
    {"rope_parameters": {"rope_type": "proportional"}},
    {"quantization_config": {"quant_method": "gptq"}},
]


@pytest.mark.parametrize("extra", REFUSED, ids=str)
def test_unsupported_settings_are_refused_by_name(extra: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(extra)).replace("rope_parameters", "rope")):
        read(LFM2 | extra)
