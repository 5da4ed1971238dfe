"""Bamba against transformers in float32: same files, same logits, same greedy tokens."""

from typing import Any, ClassVar

from transformers import BambaConfig, BambaForCausalLM, PreTrainedModel

from tests.ops.parity import VOCAB, Case, ParityTests

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}


def plain() -> PreTrainedModel:
    """Two groups of B and C, attention in the middle and at the end."""
    return BambaForCausalLM(
        BambaConfig(**COMMON, num_hidden_layers=6, attn_layer_indices=[2, 5], mamba_n_groups=2)
    )


def odd() -> PreTrainedModel:
    """Odd sizes, a quarter of each head rotated, tied embeddings, a short convolution."""
    case = COMMON | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    case |= {"mamba_n_heads": 6, "mamba_d_state": 24, "mamba_d_conv": 3, "mamba_chunk_size": 16}
    rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25}
    return BambaForCausalLM(
        BambaConfig(
            **case,
            num_hidden_layers=4,
            attn_layer_indices=[0],
            rope_parameters=rope,
            tie_word_embeddings=True,
        )
    )


def biased() -> PreTrainedModel:
    return BambaForCausalLM(
        BambaConfig(
            **COMMON,
            num_hidden_layers=4,
            attn_layer_indices=[1, 3],
            attention_bias=True,
            mlp_bias=True,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
        )
    )


class TestBamba(ParityTests):
    CASES: ClassVar = {
        "plain": Case(plain),
        "odd": Case(odd),
        "biased": Case(biased, seed=10),
    }
