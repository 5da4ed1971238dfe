"""Qwen models against transformers in float32: same files, logits and greedy tokens."""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.ops.parity import COMMON, LENGTH, ROPE, Case, ParityTests


def heads(attention: int, keys: int, size: int) -> dict[str, int]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return dict(zip(names, (attention, keys, size), strict=True))


def delta_heads(keys: int, values: int, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": LENGTH // 2,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
QWEN3 = {
    "plain": COMMON | heads(4, 2, 16) | {"num_hidden_layers": 3, "rope_parameters": ROPE},
    # One K/V head, heads wider than hidden / heads.
    "tied": COMMON | heads(6, 1, 32) | {"num_hidden_layers": 4, "tie_word_embeddings": True},
    # Half of the texts' positions are past the context of pretraining.
    "yarn": COMMON
    | heads(4, 2, 24)
    | {"num_hidden_layers": 3, "rope_parameters": YARN, "max_position_embeddings": 4 * LENGTH},
    "ungrouped": COMMON | heads(4, 4, 8) | {"num_hidden_layers": 2, "rms_norm_eps": 1e-3},
}
QWEN3_5_PLAIN = COMMON | delta_heads(2, 4, 16, 32) | heads(4, 2, 32) | {"num_hidden_layers": 8}
# Tied embeddings, half rotary, attention first, no grouping of value heads.
QWEN3_5_TIED = {
    **COMMON | delta_heads(4, 4, 32, 32) | heads(4, 1, 16),
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention", "linear_attention"] * 2,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
}


def experts(count: int, top_k: int, inner: int, shared: int) -> dict[str, int]:
    return {
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
    }


QWEN3_MOE = COMMON | heads(4, 2, 16) | experts(7, 3, 24, 0) | {"num_hidden_layers": 4}
QWEN3_MOE |= {"mlp_only_layers": [1], "norm_topk_prob": False}
QWEN3_5_MOE = COMMON | delta_heads(2, 6, 16, 16) | heads(6, 2, 16) | experts(9, 4, 24, 40)
QWEN3_NEXT = COMMON | delta_heads(3, 6, 16, 8) | heads(4, 2, 16) | experts(5, 2, 16, 40)
QWEN3_NEXT |= {"num_hidden_layers": 4, "decoder_sparse_step": 2}


def wrapped(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """The vision-language wrapper, a short convolution and odd head counts."""
    text: dict[str, Any] = COMMON | delta_heads(1, 3, 24, 16) | heads(6, 3, 16)
    text |= {"num_hidden_layers": 4, "linear_conv_kernel_dim": 3}
    text["rope_parameters"] = ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4}
    return kind(text_config=text | changes, vision_config=vision)


def add_mtp_head(folder: Path) -> None:
    """Hub checkpoints carry a multi-token-prediction head that is not part of the text model."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {"mtp.fc.weight": torch.zeros(2, 2)}
    save_file(tensors, path, {"format": "pt"})


def spell_the_old_way(folder: Path) -> None:
    """Top-level `rope_theta` and `torch_dtype`, as transformers 4 wrote them."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    fields["torch_dtype"] = fields.pop("dtype")
    path.write_text(json.dumps(fields))


def spell_scaling_the_old_way(folder: Path) -> None:
    """`rope_scaling` of `type`, beside `rope_theta`."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    scaling = fields.pop("rope_parameters")
    fields |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    scaling["type"] = scaling.pop("rope_type")
    path.write_text(json.dumps(fields))


class TestQwen(ParityTests):
    LONG: ClassVar = ("qwen3-tied", "qwen3-ungrouped", "qwen3_5-plain", "qwen3_5_moe")
    CASES: ClassVar = {
        "qwen3-plain": Case(Qwen3Config(**QWEN3["plain"]), spell_the_old_way),
        "qwen3-tied": Case(Qwen3Config(**QWEN3["tied"])),
        "qwen3-ungrouped": Case(Qwen3Config(**QWEN3["ungrouped"])),
        "qwen3-yarn": Case(Qwen3Config(**QWEN3["yarn"]), spell_scaling_the_old_way),
        "qwen3_5-plain": Case(Qwen3_5TextConfig(**QWEN3_5_PLAIN)),
        "qwen3_5-tied": Case(Qwen3_5TextConfig(**QWEN3_5_TIED)),
        "qwen3_5-wrapped": Case(
            wrapped(Qwen3_5Config), add_mtp_head, Qwen3_5ForConditionalGeneration
        ),
        "qwen3_moe": Case(Qwen3MoeConfig(**QWEN3_MOE)),
        "qwen3_5_moe": Case(Qwen3_5MoeTextConfig(**QWEN3_5_MOE, num_hidden_layers=4)),
        "qwen3_5_moe-wrapped": Case(
            wrapped(Qwen3_5MoeConfig, **experts(6, 2, 32, 24)),
            add_mtp_head,
            Qwen3_5MoeForConditionalGeneration,
        ),
        "qwen3_next": Case(Qwen3NextConfig(**QWEN3_NEXT)),
    }
