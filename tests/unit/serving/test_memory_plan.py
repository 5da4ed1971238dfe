"""Bytes of a model on a device, from the headers of its files, beside numbers made by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError, ConfigError
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.safetensors_headers import read_headers
from serving.memory_plan import RESERVE_BYTES, Batch, MemoryPlan, plan_memory, weight_bytes
from serving.node import limits
from serving.node.limits import check_device_memory

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 32, 100
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 1024,
}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(folder: Path, tensors: dict[str, torch.Tensor], **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_weights_take_the_bytes_of_the_computed_type(tmp_path: Path) -> None:
    float8 = torch.zeros(10, 10).to(torch.float8_e4m3fn)
    tensors = {
        TABLE: torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16),
        HEAD: torch.zeros(VOCAB, HIDDEN),
        "a.weight": float8,
        "a.weight_scale_inv": torch.ones(1, 1),
        "a.input_scale": torch.ones(()),
        "mtp.layers.0.weight": torch.zeros(1000),
        "model.rotary_emb.inv_freq": torch.zeros(16),
    }
    settings = {"quant_method": "fp8"}
    folder = save(tmp_path, tensors, quantization_config=settings)
    numbers = 2 * VOCAB * HIDDEN + 100
    for dtype, size in (("auto", 2), ("float32", 4)):
        assert weight_bytes(read_config(folder, dtype), read_headers(folder)) == size * numbers
    save(tmp_path, tensors, quantization_config=settings, tie_word_embeddings=True)
    tied = weight_bytes(read_config(folder, "auto"), read_headers(folder))
    assert tied == 2 * (numbers - VOCAB * HIDDEN), "the head is that of the embeddings"


def test_estimates_are_those_of_the_formula(tmp_path: Path) -> None:
    config = read_config(save(tmp_path, {TABLE: torch.zeros(VOCAB, HIDDEN)}), "auto")
    arena = plan_arena(config.groups, 16, 1 << 20)
    batch = Batch(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=1000)
    found = plan_memory(config, read_headers(tmp_path), arena, batch=batch)
    # Attention is wider than the MLP: q, gate, their result and its input, k and v.
    n = 4 * HIDDEN + HEAD_DIM * (4 * HEADS + 2 * KV_HEADS)
    sequence = 63 * 16 * 2 * KV_HEADS * HEAD_DIM * 2
    assert found == MemoryPlan(
        weights=2 * VOCAB * HIDDEN,
        arena=arena.arena_bytes,
        # 1,000 tokens are 4 splits; 16 stops, and tables of 63 blocks.
        graphs=8 * (4 * (n + 4 * HEADS * HEAD_DIM) + 8 * (3 + 16 + 63)),
        chunk=256 * 4 * n + sequence,
        logits=8 * 12 * VOCAB,
    )
    assert found.total - found.arena == found.beside_arena > RESERVE_BYTES


def test_an_arena_may_take_all_that_is_left_and_no_byte_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryPlan(weights=5, arena=100, graphs=1, chunk=2, logits=3)
    monkeypatch.setattr(limits, "device_memory", lambda device: (RESERVE_BYTES + 111, 1 << 40))
    check_device_memory(memory, "cuda")
    monkeypatch.setattr(limits, "device_memory", lambda device: (RESERVE_BYTES + 110, 1 << 40))
    with pytest.raises(ConfigError, match="at most 99 fit"):
        check_device_memory(memory, "cuda")


def test_headers_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: no saf"):
        read_headers(tmp_path)
