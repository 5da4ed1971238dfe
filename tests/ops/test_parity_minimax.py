"""MiniMax-01 against transformers in float32: same files, logits and greedy tokens."""

from typing import ClassVar

from transformers import MiniMaxConfig

from tests.ops.parity import COMMON, ROPE, Case, ParityTests

LIGHTNING, ATTENTION = "linear_attention", "full_attention"
MINIMAX = COMMON | {
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": [LIGHTNING, LIGHTNING, ATTENTION, LIGHTNING],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 0.9,
    "mlp_beta_factor": 1.3,
}
# Odd sizes, factors of one, heads wider than their share of the hidden channels, and one expert.
ODD = COMMON | {
    "hidden_size": 56,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "num_hidden_layers": 3,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "block_size": 100,
    "rope_parameters": ROPE,
}


class TestMiniMax(ParityTests):
    CASES: ClassVar = {
        "factors": Case(MiniMaxConfig(**MINIMAX)),
        "odd": Case(MiniMaxConfig(**ODD)),
    }
