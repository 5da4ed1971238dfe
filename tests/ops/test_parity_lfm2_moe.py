"""LFM2-MoE against transformers in float32: same files, logits and greedy tokens."""

from typing import ClassVar

from transformers import Lfm2MoeConfig

from tests.ops.parity import COMMON, Case, ParityTests

CONV, ATTENTION = "conv", "full_attention"
MOE = COMMON | {
    "moe_intermediate_size": 40,
    "num_dense_layers": 1,
    "num_hidden_layers": 4,
    "layer_types": [CONV, CONV, ATTENTION, CONV],
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "tie_word_embeddings": False,
}
# Neither a correction nor shares that sum to one.
PLAIN = MOE | {
    "num_dense_layers": 0,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "use_expert_bias": False,
    "norm_topk_prob": False,
}


class TestLfm2Moe(ParityTests):
    CASES: ClassVar = {
        "corrected": Case(Lfm2MoeConfig(**MOE)),
        "plain": Case(Lfm2MoeConfig(**PLAIN), seed=11),
    }
