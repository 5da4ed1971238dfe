"""Reading config.json of Kimi Linear: as published, as saved by transformers, refusals."""

import json
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.families import kimi_linear
from engine.families.registry import config_of
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import LatentAttentionSpec, MambaSpec, StatePart
from engine.model_configs.attention import LatentAttentionConfig
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig, RouterConfig, Scoring
from engine.model_configs.model_config import ModelConfig, renamed

# All keys of Kimi-Linear-48B-A3B-Instruct, with fewer layers and experts.
PUBLISHED: dict[str, Any] = json.loads("""{
  "architectures": ["KimiLinearForCausalLM"],
  "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
  "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "dtype": "bfloat16",
  "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
  "initializer_range": 0.02, "intermediate_size": 9216, "kv_lora_rank": 512,
  "linear_attn_config": {
    "full_attn_layers": [4, 5], "head_dim": 128, "kda_layers": [1, 2, 3], "num_heads": 32,
    "short_conv_kernel_size": 4
  },
  "mla_use_nope": true, "model_max_length": 1048576, "model_type": "kimi_linear",
  "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
  "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
  "num_experts": 16, "num_experts_per_token": 8, "num_hidden_layers": 5,
  "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
  "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
  "tie_word_embeddings": false, "topk_group": 1, "transformers_version": "4.57.1",
  "use_cache": true, "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163840
}""")
STATE = MambaSpec(
    "kimi_delta_attention", (StatePart((3, 12288), "bfloat16"), StatePart((32, 128, 128)))
)


def read(**changes: Any) -> ModelConfig:
    return config_of(ConfigReader(PUBLISHED | changes, "config.json"), None)


def test_the_published_config_keeps_states_and_latents() -> None:
    config = read()
    assert config.max_position_embeddings == 1_048_576
    state, latent = config.groups
    assert (state.spec, state.layers) == (STATE, (0, 1, 2))
    assert (latent.spec, latent.layers) == (LatentAttentionSpec(1, 576, "bfloat16"), (3, 4))
    (_, mixer), feed_forward = config.layers[4][0].parts[0], config.layers[4][1].parts
    assert isinstance(mixer, LatentAttentionConfig)
    assert (mixer.scale, mixer.norm_eps) == (192**-0.5, 1e-6)
    router = RouterConfig(
        count=16,
        top_k=8,
        scoring=Scoring.SIGMOID,
        floor=1e-20,
        correction_bias=True,
        scale=2.446,
    )
    assert feed_forward == (
        ("mlp", ExpertsConfig(router=router, intermediate_size=1024)),
        ("mlp.shared_experts", MLPConfig(intermediate_size=1024)),
    )
    assert config.layers[0][1].parts == (("mlp", MLPConfig(intermediate_size=9216)),)


def test_a_latent_is_planned_with_little_waste() -> None:
    """576 channels a token and layer, where 32 heads of K (192) and V (128) would be 10,240."""
    plan = plan_arena(read().groups, 16, 16 << 30)
    spec = plan.groups[1].spec
    assert isinstance(spec, LatentAttentionSpec)
    assert spec.page_bytes(1) == 576 * 2
    assert max(map(plan.waste, range(2))) < 0.03


def test_experts_may_be_in_every_other_layer() -> None:
    config = read(moe_layer_freq=2, num_shared_experts=0)
    kinds = [[type(part) for _, part in layer[1].parts] for layer in config.layers]
    assert kinds == [[MLPConfig], [MLPConfig], [ExpertsConfig], [MLPConfig], [ExpertsConfig]]


def test_names_of_tensors_on_the_hub_and_in_memory_are_ours() -> None:
    layer = "model.layers.1."
    names = {
        f"{layer}block_sparse_moe.experts.3.w1.weight": f"{layer}mlp.experts.3.gate_proj.weight",
        f"{layer}block_sparse_moe.experts.3.w2.weight": f"{layer}mlp.experts.3.down_proj.weight",
        f"{layer}block_sparse_moe.experts.3.w3.weight": f"{layer}mlp.experts.3.up_proj.weight",
        f"{layer}self_attn.forget_gate.A_log": f"{layer}self_attn.A_log",
    }
    assert {name: renamed(name, kimi_linear.RENAMES) for name in names} == names


LISTS = PUBLISHED["linear_attn_config"]
REFUSED: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"mla_use_nope": False},
    {"moe_router_activation_func": "softmax"},
    {"use_grouped_topk": False},
    {"attention_bias": True},
    {"num_key_value_heads": 8},
    {"moe_layer_freq": 0},
    {"mlp_layer_types": ["dense"] * 4},
    {"layer_types": ["sliding_attention"] * 5},
    {"linear_attn_config": LISTS | {"kda_layers": [1, 2]}},
    {"linear_attn_config": LISTS | {"full_attn_layers": ["4", 5]}},
    {"linear_attn_config": LISTS | {"head_dim": None}},
    {"linear_attn_config": None},
]


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_unsupported_settings_are_refused_by_name(changes: dict[str, Any]) -> None:
    key, value = next(iter(changes.items()))
    if isinstance(value, dict):
        key = next(name for name in value if value[name] != LISTS[name])
    elif value is None:
        key = "linear_num_heads"
    with pytest.raises(CheckpointError, match=key):
        read(**changes)
