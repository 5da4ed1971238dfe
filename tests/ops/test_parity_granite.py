"""GraniteMoeHybrid against transformers in float32: same files, logits and greedy tokens."""

import json
from pathlib import Path
from typing import ClassVar

from safetensors.torch import load_file, save_file
from transformers import GraniteMoeHybridConfig

from tests.ops.parity import COMMON, ROPE, Case, ParityTests

IN_MEMORY = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}
MAMBA, ATTENTION = "linear_attention", "full_attention"
GRANITE = COMMON | {
    "intermediate_size": 40,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "embedding_multiplier": 6.0,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.35,
}
# No positions, no experts, two groups of B and C.
DENSE = GRANITE | {
    "num_local_experts": 0,
    "num_hidden_layers": 6,
    "layer_types": [MAMBA, MAMBA, ATTENTION] * 2,
    "mamba_n_groups": 2,
}
EXPERTS = GRANITE | {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 4,
    "layer_types": [MAMBA, ATTENTION] * 2,
    "position_embedding_type": "rope",
    "rope_parameters": ROPE,
    "tie_word_embeddings": True,
}
# As the dense Granite models that are not hybrid; with biases.
ATTENTION_ONLY = GRANITE | {
    "num_local_experts": 0,
    "num_hidden_layers": 3,
    "layer_types": [ATTENTION] * 3,
    "position_embedding_type": "rope",
    "attention_bias": True,
}
# Odd sizes; one expert per token; layers that are all Mamba2 but one.
BIASED = GRANITE | {
    "hidden_size": 48,
    "mamba_n_heads": 6,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "layer_types": [MAMBA, MAMBA, MAMBA, ATTENTION],
    "attention_bias": True,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "mamba_chunk_size": 16,
}


def spell_as_on_the_hub(folder: Path) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    kinds = {MAMBA: "mamba", ATTENTION: "attention"}
    fields["layer_types"] = [kinds[kind] for kind in fields["layer_types"]]
    fields["position_embedding_type"] = "nope"
    fields["time_step_limit"] = [0.0, float("inf")]
    path.write_text(json.dumps(fields))


def name_as_in_memory(folder: Path) -> None:
    """transformers saves the hub's names; a checkpoint may as well hold those of its modules."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert any(name.endswith("input_linear.weight") for name in tensors)
    for name, new in IN_MEMORY.items():
        for stored in [stored for stored in tensors if stored.endswith(name)]:
            tensors[stored.removesuffix(name) + new] = tensors.pop(stored)
    save_file(tensors, path, {"format": "pt"})


class TestGranite(ParityTests):
    LONG: ClassVar = ("attention-only",)
    CASES: ClassVar = {
        "dense": Case(GraniteMoeHybridConfig(**DENSE), spell_as_on_the_hub),
        "experts": Case(GraniteMoeHybridConfig(**EXPERTS), seed=4, embed=0.01),
        "attention-only": Case(GraniteMoeHybridConfig(**ATTENTION_ONLY), seed=6),
        "biased": Case(GraniteMoeHybridConfig(**BIASED), name_as_in_memory, seed=2),
    }
