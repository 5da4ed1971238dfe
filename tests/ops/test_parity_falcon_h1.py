"""Falcon-H1 against transformers in float32: same files, same logits, same greedy tokens."""

from typing import Any, ClassVar

from transformers import FalconH1Config, FalconH1ForCausalLM, PreTrainedModel

from tests.ops.parity import VOCAB, Case, ParityTests

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_state": 16,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.88, 0.59],
    "key_multiplier": 0.39,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.94,
    "ssm_multipliers": [0.35, 0.5, 0.7, 0.6, 0.4],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
}


def plain() -> PreTrainedModel:
    """As published: only a gate, no norm after the scan; heads wider than hidden / heads."""
    return FalconH1ForCausalLM(
        FalconH1Config(**COMMON | MULTIPLIERS, num_hidden_layers=3, head_dim=24)
    )


def gate_then_norm() -> PreTrainedModel:
    """Two groups, all biases, mixer channels from `mamba_expand`, a huge rope base."""
    case = COMMON | MULTIPLIERS | {"mamba_d_ssm": None, "mamba_n_heads": 8}
    return FalconH1ForCausalLM(
        FalconH1Config(
            **case,
            num_hidden_layers=2,
            mamba_n_groups=2,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e11},
        )
    )


def norm_then_gate() -> PreTrainedModel:
    """Tied embeddings, no multipliers, an odd number of channels per state."""
    case = COMMON | {"mamba_d_state": 24, "mamba_d_conv": 3, "num_key_value_heads": 1}
    return FalconH1ForCausalLM(
        FalconH1Config(
            **case,
            num_hidden_layers=3,
            mamba_rms_norm=True,
            mamba_conv_bias=False,
            mamba_chunk_size=16,
            tie_word_embeddings=True,
        )
    )


class TestFalconH1(ParityTests):
    CASES: ClassVar = {
        "plain": Case(plain, seed=11),
        "gate-then-norm": Case(gate_then_norm, seed=9),
        "norm-then-gate": Case(norm_then_gate),
    }
