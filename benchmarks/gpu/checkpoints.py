"""Random checkpoints: a small one of every family, and one as large as a published model."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONTEXT = 1024
VOCABULARY = 512
SHARED = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 1,
    }
)
PUBLISHED = Path(__file__).parents[1] / "published_models"
SHARD_BYTES = 2 << 30


def _families() -> Mapping[str, Callable[[], Any]]:
    import transformers  # heavy, and half of the phases need none of it

    mamba = {"mamba_n_heads": 8, "mamba_d_state": 16}
    head = {"head_dim": 32}
    return {
        "qwen3": lambda: transformers.Qwen3Config(num_hidden_layers=3, **SHARED, **head),
        "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            **SHARED,
            **head,
        ),
        "nemotron_h": lambda: transformers.NemotronHConfig(
            layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
            num_hidden_layers=5,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            **SHARED,
            **head,
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            num_hidden_layers=4,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **SHARED,
            **head,
        ),
        "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
            num_hidden_layers=4,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=96,
            **mamba,
            **SHARED,
        ),
        "falcon_h1": lambda: transformers.FalconH1Config(
            num_hidden_layers=3,
            mamba_d_ssm=96,
            mamba_n_heads=6,
            mamba_d_state=16,
            **SHARED,
            **head,
        ),
    }


FAMILIES = ("qwen3", "qwen3_5", "nemotron_h", "gemma3", "granitemoehybrid", "falcon_h1")


def small(family: str, models: Path) -> Path:
    """A float32 checkpoint of some thousand parameters in a folder of `models`, made once."""
    import transformers

    folder = models / family
    if not folder.exists():
        model = transformers.AutoModelForCausalLM.from_config(_families()[family]()).float()
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(_drawn(name, weight, draw))
        model.save_pretrained(models / f"{family}.part")
        (models / f"{family}.part").rename(folder)
    return folder


def published(name: str, models: Path, device: str, *, num_layers: int | None = None) -> Path:
    """A random bfloat16 checkpoint of `published_models`, drawn on `device`; tied embeddings."""
    import transformers

    folder = models / (name if num_layers is None else f"{name}-{num_layers}")
    if folder.exists():
        return folder
    content = json.loads((PUBLISHED / name / "config.json").read_text())
    content["tie_word_embeddings"] = True
    if num_layers is not None:
        content["num_hidden_layers"] = num_layers
    part = models / f"{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / "config.json").write_text(json.dumps(content))
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(part)
        model = transformers.AutoModelForCausalLM.from_config(config)
    draw = torch.Generator(device).manual_seed(7)
    shard: dict[str, Tensor] = {}
    placed: dict[str, str] = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight":
            continue
        like = torch.ones(weight.shape, device=device)
        shard[key] = _drawn(key, like, draw).bfloat16().cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            _save(shard, part, placed)
    _save(shard, part, placed)
    (part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    part.rename(folder)
    return folder


def _save(shard: dict[str, Tensor], folder: Path, placed: dict[str, str]) -> None:
    """One more file; `shard` is empty afterwards."""
    name = f"model-{len(set(placed.values()))}.safetensors"
    save_file(shard, folder / name)
    placed.update(dict.fromkeys(shard, name))
    shard.clear()


def _drawn(name: str, weight: Tensor, draw: torch.Generator) -> Tensor:
    """`weight` anew, on the scale that its name asks for, so that no part of a model is idle."""
    noise = torch.randn(weight.shape, generator=draw, device=weight.device)
    leaf = name.rsplit(".", 2)[-2 if name.endswith(("weight", "bias")) else -1]
    if leaf == "A_log":
        return torch.rand(weight.shape, generator=draw, device=weight.device).mul_(8.0).sub_(6.0)
    if leaf == "dt_bias" or name.endswith("bias"):
        return noise
    if leaf == "D" or "norm" in leaf:
        return weight + 0.4 * noise
    if leaf == "conv1d":
        return 0.5 * noise
    return 0.1 * noise if "embed" in leaf else noise * weight.shape[-1] ** -0.5
