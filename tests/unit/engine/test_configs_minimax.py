"""Reading config.json of MiniMax-01: a file as published, factors, refusals."""

import json
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.families import minimax
from engine.families.registry import config_of
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, StatePart
from engine.model_configs.attention import AttentionConfig
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, RouterConfig
from engine.model_configs.model_config import ModelConfig, renamed
from engine.model_configs.recurrent import LightningAttentionConfig
from engine.model_configs.rope import RopeConfig

# As MiniMax-Text-01-hf; its 80 layers are cut to eight.
PUBLISHED = """{
  "architectures": ["MiniMaxForCausalLM"], "attention_dropout": 0.0, "block_size": 256,
  "bos_token_id": null, "eos_token_id": null, "full_attn_alpha_factor": 3.5565588200778455,
  "full_attn_beta_factor": 1.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
  "initializer_range": 0.02, "intermediate_size": 9216,
  "layer_types": ["linear_attention", "linear_attention", "linear_attention", "linear_attention",
    "linear_attention", "linear_attention", "linear_attention", "full_attention"],
  "linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 1.0,
  "max_position_embeddings": 10240000, "mlp_alpha_factor": 3.5565588200778455,
  "mlp_beta_factor": 1.0, "model_type": "minimax", "num_attention_heads": 64,
  "num_experts_per_tok": 2, "num_hidden_layers": 8, "num_key_value_heads": 8,
  "num_local_experts": 32, "output_router_logits": false, "postnorm": true,
  "rms_norm_eps": 1e-05, "rope_theta": 10000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
  "router_jitter_noise": 0.0, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.53.0", "use_cache": true, "vocab_size": 200064
}"""
MINIMAX: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "vocab_size": 100,
}


def read(fields: dict[str, Any]) -> ModelConfig:
    return config_of(ConfigReader({"architectures": ["MiniMaxForCausalLM"]} | fields, "f"), None)


def test_a_published_file() -> None:
    config = read(json.loads(PUBLISHED))
    state, attention = config.groups
    assert state.spec == MambaSpec("lightning_attention", (StatePart((64, 128, 128)),))
    assert state.layers == tuple(range(7))
    assert attention.spec == FullAttentionSpec(8, 128, "bfloat16")
    (full,) = config.mixers[7]
    assert isinstance(full, AttentionConfig)
    # Half of each head, which transformers leaves out.
    assert full.rope == RopeConfig(1e7, 64)
    assert {block.normed_residual for own in config.layers for block in own} == {3.5565588200778455}


def test_factors_are_of_kinds_of_layers_and_fold_into_the_parts() -> None:
    kinds = ("full_attn", "linear_attn", "mlp")
    alphas = {f"{kind}_alpha_factor": number for number, kind in enumerate(kinds, 2)}
    betas = {f"{kind}_beta_factor": number / 8 for number, kind in enumerate(kinds, 2)}
    config = read(MINIMAX | alphas | betas)
    # Without `layer_types` every second layer is lightning attention, as in transformers.
    (first, mlp), (second, _) = config.layers[:2]
    assert [block.normed_residual for block in (first, second, mlp)] == [2.0, 3.0, 4.0]
    full, lightning, experts = (block.parts[0][1] for block in (first, second, mlp))
    assert isinstance(full, AttentionConfig)
    assert (full.output_scale, full.rope) == (0.25, RopeConfig(1e6, 16))
    assert lightning == LightningAttentionConfig(num_heads=4, head_dim=16, output_scale=0.375)
    router = RouterConfig(count=5, top_k=2, scale=0.5)
    assert experts == ExpertsConfig(router=router, intermediate_size=40)


def test_names_of_tensors() -> None:
    layer = "model.layers.1"
    names = {
        f"{layer}.self_attn.slope_rate": None,
        f"{layer}.self_attn.diagonal_decay": None,
        f"{layer}.self_attn.qkv_proj.weight": f"{layer}.self_attn.qkv_proj.weight",
        f"{layer}.block_sparse_moe.gate.weight": f"{layer}.mlp.gate.weight",
        f"{layer}.block_sparse_moe.experts.4.w2.weight": f"{layer}.mlp.experts.4.down_proj.weight",
    }
    assert {name: renamed(name, minimax.RENAMES) for name in names} == names


REFUSED: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"sliding_window": 4096},
    {"shared_intermediate_size": 128},
    {"postnorm": False},
    {"attn_type_list": [0, 0, 0, 1]},
    {"layer_types": ["linear_attention"] * 3},
    {"rotary_dim": 20},
    {"num_experts_per_tok": 6},
]


@pytest.mark.parametrize("extra", REFUSED, ids=str)
def test_unsupported_settings_are_refused_by_name(extra: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(extra)).replace("rotary_dim", "rotate 20")):
        read(MINIMAX | extra)
