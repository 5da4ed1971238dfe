"""Published models keep 16-token blocks with little waste: config text in, arena plan out.

Only what decides sizes is in the texts. State and K/V bytes per layer are those of the published
tables (bfloat16; conv rows in bfloat16, temporal states in float32).
"""

import json
from pathlib import Path

import pytest

from engine.kv_cache.plan import plan_arena
from engine.kv_cache.report import plan_report
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec
from engine.model_configs import qwen3_5
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.registry import read_config

QWEN3_5_4B = """{
  "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16",
  "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "vocab_size": 248320,
  "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
  "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
  "linear_num_key_heads": 16, "linear_key_head_dim": 128,
  "linear_num_value_heads": 32, "linear_value_head_dim": 128
}"""
QWEN3_NEXT_80B_A3B = """{
  "architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16",
  "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "vocab_size": 151936,
  "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
  "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
  "linear_num_key_heads": 16, "linear_key_head_dim": 128,
  "linear_num_value_heads": 32, "linear_value_head_dim": 128
}"""
NEMOTRON_H_8B = """{
  "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "torch_dtype": "bfloat16",
  "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52, "vocab_size": 131072,
  "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
  "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
  "conv_kernel": 4
}"""
ATTENTION_OF_GRANITE = (5, 15, 25, 35)
GRANITE_H_TINY = json.dumps(
    {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "dtype": "bfloat16",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "vocab_size": 100352,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "position_embedding_type": "nope",
        "layer_types": [
            "attention" if layer in ATTENTION_OF_GRANITE else "mamba" for layer in range(40)
        ],
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }
)
FALCON_H1_7B = """{
  "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "torch_dtype": "bfloat16",
  "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 44, "vocab_size": 130048,
  "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
  "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256,
  "mamba_n_groups": 1, "mamba_d_conv": 4
}"""
SUPPORTED = {
    # name: config, state layers, attention layers, state bytes per layer, K/V bytes per token
    "Qwen3.5-4B": (QWEN3_5_4B, 24, 8, 2_146_304, 4096),
    "Nemotron-H-8B": (NEMOTRON_H_8B, 24, 4, 4_255_744, 4096),
    "Granite-4.0-H-Tiny": (GRANITE_H_TINY, 36, 4, 1_592_832, 2048),
    "Falcon-H1-7B": (FALCON_H1_7B, 44, 44, 3_167_232, 1024),
}


def folder_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def check(groups: tuple[KVCacheGroup, ...], sizes: tuple[int, ...]) -> None:
    """Layers and bytes per group, waste, and what a prompt of 12 tokens costs."""
    plan = plan_arena(groups, 16, 16 << 30)
    found = {isinstance(group.spec, MambaSpec): group for group in groups}
    state, attention = found[True].spec, found[False].spec
    assert isinstance(state, MambaSpec) and isinstance(attention, FullAttentionSpec)
    layers = len(found[True].layers), len(found[False].layers)
    assert (*layers, state.layer_bytes, attention.page_bytes(1)) == sizes
    assert [plan.block_size_of(number) for number in range(2)] == [16, 16]
    assert [plan.blocks_for(number, 12) for number in range(2)] == [1, 1]
    assert max(map(plan.waste, range(2))) < 0.03, plan_report(plan, 4096)


@pytest.mark.parametrize("name", SUPPORTED)
def test_small_blocks_and_little_waste(tmp_path: Path, name: str) -> None:
    text, *sizes = SUPPORTED[name]
    check(read_config(folder_of(tmp_path, text)).groups, tuple(sizes))


def test_small_blocks_and_little_waste_of_qwen3_next() -> None:
    """Its layers keep what those of Qwen3.5 keep, and its config names them alike."""
    reader = ConfigReader(json.loads(QWEN3_NEXT_80B_A3B), "config.json")
    check(qwen3_5.read(reader).groups, (36, 12, 2_146_304, 2048))
