"""Kimi Linear against transformers in float32: same files, logits and greedy tokens."""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig

from tests.ops.parity import COMMON, Case, ParityTests

LINEAR, FULL = "linear_attention", "full_attention"
KIMI = COMMON | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Odd sizes; queries from a latent; groups of experts; two shared ones; not renormalised.
GROUPS = KIMI | {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 21,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 5,
    "v_head_dim": 14,
    "linear_num_heads": 3,
    "linear_head_dim": 14,
    "linear_conv_kernel_dim": 3,
    "num_local_experts": 9,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": False,
    "n_shared_experts": 2,
    "layer_types": [LINEAR, FULL] * 2,
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
}
DENSE = KIMI | {"mlp_layer_types": ["dense"] * 4, "rms_norm_eps": 1e-3}


def spell_as_on_the_hub(folder: Path) -> None:
    path = folder / "config.json"
    fields: dict[str, Any] = json.loads(path.read_text())
    types, kinds = fields.pop("layer_types"), fields.pop("mlp_layer_types")
    fields["linear_attn_config"] = {
        "full_attn_layers": [place for place, kind in enumerate(types, 1) if kind == FULL],
        "kda_layers": [place for place, kind in enumerate(types, 1) if kind == LINEAR],
        "head_dim": fields.pop("linear_head_dim"),
        "num_heads": fields.pop("linear_num_heads"),
        "short_conv_kernel_size": fields.pop("linear_conv_kernel_dim"),
    }
    fields["first_k_dense_replace"] = kinds.index("sparse")
    path.write_text(json.dumps(fields))


def name_as_in_memory(folder: Path) -> None:
    """transformers saves the hub's names; a checkpoint may as well hold those of its modules."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    own = {}
    for name, tensor in tensors.items():
        new = name.replace(".block_sparse_moe.", ".mlp.")
        for part in ("f_a_proj", "f_b_proj", "A_log", "dt_bias"):
            new = new.replace(f".self_attn.{part}", f".self_attn.forget_gate.{part}")
        if ".q_conv1d." in name:
            three = [tensors[name.replace(".q_", f".{one}_")] for one in "qkv"]
            own[new.replace(".q_conv1d.", ".conv1d.")] = torch.cat(three)
        elif "_conv1d." not in name:
            own[new] = tensor
    assert len(own) < len(tensors)
    save_file(own, path, {"format": "pt"})


class TestKimiLinear(ParityTests):
    CASES: ClassVar = {
        "hub": Case(KimiLinearConfig(**KIMI), spell_as_on_the_hub),
        "groups": Case(KimiLinearConfig(**GROUPS)),
        "dense": Case(KimiLinearConfig(**DENSE), name_as_in_memory),
    }
