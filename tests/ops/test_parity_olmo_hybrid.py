"""Olmo Hybrid against transformers in float32: same files, logits and greedy tokens."""

from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import OlmoHybridConfig

from engine.forward import ForwardBatch, SequenceLens
from engine.layers.rotary import Rotary
from engine.model_configs.rope import RopeConfig
from engine.ops.backend import torch_ops
from tests.ops.parity import COMMON, ROPE, Case, ParityTests

LINEAR, FULL = "linear_attention", "full_attention"
OLMO = COMMON | {"pad_token_id": None, "eos_token_id": 1}
NO_POSITIONS = {"rope_theta": None, "rope_type": "default"}
# As published: no positions, as many heads everywhere, values twice as wide as keys.
PLAIN = OLMO | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "rope_parameters": NO_POSITIONS,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
}
# Odd sizes, rotated, grouped heads, a short convolution, attention first.
ODD = OLMO | {
    "hidden_size": 72,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_parameters": ROPE,
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 3,
    "layer_types": [FULL, LINEAR, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": True,
}
POSITIVE = OLMO | {
    "num_hidden_layers": 2,
    "rope_parameters": ROPE,
    "layer_types": [LINEAR, FULL],
    "linear_allow_neg_eigval": False,
    "attention_bias": True,
}


def cut_convolutions_as_on_the_hub(folder: Path) -> None:
    """q, k and v have their own; transformers saves three equal parts of all channels."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for q in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [q.replace(".q_conv1d", f".{part}_conv1d") for part in "qkv"]
        taps = torch.cat([tensors[name] for name in names])
        keys = len(tensors[q.replace("conv1d", "proj")])
        parts = taps.split_with_sizes([keys, keys, len(taps) - 2 * keys])
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, path, {"format": "pt"})


def merge_convolutions_as_in_memory(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for q in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [q.replace(".q_conv1d", f".{part}_conv1d") for part in "qkv"]
        taps = torch.cat([tensors.pop(name) for name in names])
        tensors[q.replace(".q_conv1d", ".conv1d")] = taps
    save_file(tensors, path, {"format": "pt"})


class TestOlmoHybrid(ParityTests):
    CASES: ClassVar = {
        "plain": Case(OlmoHybridConfig(**PLAIN), cut_convolutions_as_on_the_hub),
        "odd": Case(OlmoHybridConfig(**ODD), merge_convolutions_as_in_memory, seed=6),
        "positive": Case(OlmoHybridConfig(**POSITIVE)),
    }


def test_a_bfloat16_model_rotates_in_float32() -> None:
    """Far out, where an angle's cosine in bfloat16 is off by more than the product's rounding."""
    heads = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions, lens = torch.tensor([3000]), SequenceLens(1, [1], [3000])
    batch = ForwardBatch(positions, positions, lens, (), positions)
    expected, got = heads.float(), heads.clone()
    rope, ops = RopeConfig(1e4, 24, wide=True), torch_ops()
    for x, dtype in ((expected, torch.float32), (got, torch.bfloat16)):
        rotary = Rotary(rope, dtype, torch.device("cpu"), ops=ops).select(batch)
        ops.rotate_(x, rotary)
    assert torch.equal(got, expected.bfloat16())
