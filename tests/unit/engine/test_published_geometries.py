"""Published models keep 16-token blocks with little waste: config text in, arena plan out.

Only what decides sizes is in the texts. State and K/V bytes per layer are those of the published
tables (bfloat16; conv rows in bfloat16, temporal states in float32).
"""

import json

import pytest

from benchmarks.support.model_folders import PUBLISHED_MODELS
from engine.families import qwen
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.report import plan_report
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec
from engine.model_configs.config_reader import ConfigReader

QWEN3_NEXT_80B_A3B = """{
  "architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16",
  "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "vocab_size": 151936,
  "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
  "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
  "linear_num_key_heads": 16, "linear_key_head_dim": 128,
  "linear_num_value_heads": 32, "linear_value_head_dim": 128
}"""
SUPPORTED = {
    # name: state layers, attention layers, state bytes per layer, K/V bytes per token
    "Qwen3.5-4B": (24, 8, 2_146_304, 4096),
    "Nemotron-H-8B": (24, 4, 4_255_744, 4096),
    "Granite-4.0-H-Tiny": (36, 4, 1_592_832, 2048),
    "Falcon-H1-7B": (44, 44, 3_167_232, 1024),
}


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
def test_small_blocks_and_little_waste(name: str) -> None:
    check(read_config(PUBLISHED_MODELS / name).groups, SUPPORTED[name])


def test_small_blocks_and_little_waste_of_qwen3_next() -> None:
    """Its layers keep what those of Qwen3.5 keep, and its config names them alike."""
    reader = ConfigReader(json.loads(QWEN3_NEXT_80B_A3B), "config.json")
    check(qwen.read_qwen3_5(reader).groups, (36, 12, 2_146_304, 2048))
