"""Falcon-H1 against transformers in float32: same files, same logits, same greedy tokens."""

from typing import Any, ClassVar

from transformers import FalconH1Config

from tests.ops.parity import COMMON, Case, ParityTests

MAMBA = COMMON | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16}
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
# Two groups, all biases, mixer channels from `mamba_expand`, a huge rope base.
GATE_THEN_NORM = {
    "mamba_d_ssm": None,
    "mamba_n_heads": 8,
    "num_hidden_layers": 2,
    "mamba_n_groups": 2,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": True,
    "projectors_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
}
# Tied embeddings, no multipliers, an odd number of channels per state.
NORM_THEN_GATE = {
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "mamba_rms_norm": True,
    "mamba_conv_bias": False,
    "mamba_chunk_size": 16,
    "tie_word_embeddings": True,
}


class TestFalconH1(ParityTests):
    CASES: ClassVar = {
        # As published: only a gate, no norm after the scan; heads wider than hidden / heads.
        "plain": Case(
            FalconH1Config(**MAMBA | MULTIPLIERS, num_hidden_layers=3, head_dim=24), seed=11
        ),
        "gate-then-norm": Case(FalconH1Config(**MAMBA | MULTIPLIERS | GATE_THEN_NORM), seed=9),
        "norm-then-gate": Case(FalconH1Config(**MAMBA | NORM_THEN_GATE)),
    }
