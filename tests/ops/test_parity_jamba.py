"""Jamba against transformers in float32: same files, same logits, same greedy tokens."""

import re
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import JambaConfig

from tests.ops.parity import COMMON, Case, ParityTests

JAMBA = COMMON | {"pad_token_id": None, "attn_layer_period": 3, "attn_layer_offset": 1}
DENSE = JAMBA | {"num_hidden_layers": 4, "num_experts": 1}
# Odd sizes, three experts of five, tied embeddings. transformers multiplies experts in bfloat16 by
# rows of whole 16 bytes only.
ODD = JAMBA | {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "num_hidden_layers": 5,
    "attn_layer_offset": 0,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "expert_layer_period": 3,
    "expert_layer_offset": 2,
    "mamba_d_state": 11,
    "mamba_d_conv": 3,
    "mamba_expand": 3,
    "mamba_dt_rank": 7,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
}
BIASED = JAMBA | {
    "num_hidden_layers": 3,
    "num_experts": 4,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
}


def stack_experts_as_in_memory(folder: Path) -> None:
    """transformers saves the hub's names, one tensor for each expert's product."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    parts = {re.sub(r"\.\d+\.\w+\.weight$", "", name) for name in tensors if ".experts." in name}
    for part in sorted(parts):
        gate, up, down = (
            torch.stack([tensors.pop(f"{part}.{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{part}.gate_up_proj": torch.cat([gate, up], 1), f"{part}.down_proj": down}
    assert parts
    save_file(tensors, path, {"format": "pt"})


class TestJamba(ParityTests):
    CASES: ClassVar = {
        "dense": Case(JambaConfig(**DENSE)),
        "odd": Case(JambaConfig(**ODD)),
        "biased": Case(JambaConfig(**BIASED), stack_experts_as_in_memory, seed=1),
    }
