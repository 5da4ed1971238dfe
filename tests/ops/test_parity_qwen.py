"""Qwen3 and Qwen3.5 against transformers in float32: same files, logits and greedy tokens."""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.ops.parity import VOCAB, Case, ParityTests

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
}
ROPE = {"rope_type": "default", "rope_theta": 5e4}


def qwen3_plain() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            **COMMON,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters=ROPE,
        )
    )


def qwen3_tied() -> PreTrainedModel:
    """One K/V head, heads wider than hidden / heads, tied embeddings."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            **COMMON,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=True,
        )
    )


def qwen3_ungrouped() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            **COMMON,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
            rms_norm_eps=1e-3,
        )
    )


def delta_heads(keys: int, values: int, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


def qwen3_5_plain() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **COMMON,
            **delta_heads(2, 4, 16, 32),
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
    )


def qwen3_5_tied() -> PreTrainedModel:
    """Tied embeddings, half rotary, attention first, no grouping of value heads."""
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **COMMON,
            **delta_heads(4, 4, 32, 32),
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
            layer_types=["full_attention", "linear_attention"] * 2,
            rope_parameters=ROPE | {"partial_rotary_factor": 0.5},
        )
    )


def qwen3_5_wrapped() -> PreTrainedModel:
    """The vision-language wrapper, a short convolution and odd head counts."""
    text: dict[str, Any] = COMMON | delta_heads(1, 3, 24, 16)
    text |= {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3}
    text |= {"head_dim": 16, "linear_conv_kernel_dim": 3}
    text["rope_parameters"] = ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


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


class TestQwen(ParityTests):
    CASES: ClassVar = {
        "qwen3-plain": Case(qwen3_plain, spell_the_old_way),
        "qwen3-tied": Case(qwen3_tied),
        "qwen3-ungrouped": Case(qwen3_ungrouped),
        "qwen3_5-plain": Case(qwen3_5_plain),
        "qwen3_5-tied": Case(qwen3_5_tied),
        "qwen3_5-wrapped": Case(qwen3_5_wrapped, add_mtp_head),
    }
