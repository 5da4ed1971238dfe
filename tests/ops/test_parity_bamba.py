"""Bamba against transformers in float32: same files, same logits, same greedy tokens."""

from typing import ClassVar

from transformers import BambaConfig

from tests.ops.parity import COMMON, ROPE, Case, ParityTests

MAMBA = COMMON | {"mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 16}
# Odd sizes, a quarter of each head rotated, tied embeddings, a short convolution.
ODD = MAMBA | {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_n_heads": 6,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 4,
    "attn_layer_indices": [0],
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}
BIASED = MAMBA | {
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
}


class TestBamba(ParityTests):
    LONG: ClassVar = ("odd",)
    CASES: ClassVar = {
        # Two groups of B and C, attention in the middle and at the end.
        "plain": Case(
            BambaConfig(**MAMBA, num_hidden_layers=6, attn_layer_indices=[2, 5], mamba_n_groups=2)
        ),
        "odd": Case(BambaConfig(**ODD)),
        "biased": Case(BambaConfig(**BIASED), seed=10),
    }
