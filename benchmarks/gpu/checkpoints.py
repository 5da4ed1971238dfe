"""Random checkpoints: a small one of every family, and one as large as a published model."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.support.model_folders import PUBLISHED_MODELS
from benchmarks.support.small_models import configs, spread, widen

CONTEXT = 1024
SHARD_BYTES = 2 << 30


@contextmanager
def _without_fla() -> Iterator[None]:
    """transformers builds models of fla's kernels where it finds them, on whatever device they run.

    It asks once, and remembers.
    """
    known = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]
        if known is not None:
            sys.modules["fla"] = known


def small(family: str, models: Path) -> Path:
    """A float32 checkpoint of some thousand parameters in a folder of `models`, made once."""
    folder = models / family
    if not folder.exists():
        with _without_fla():
            model = transformers.AutoModelForCausalLM.from_config(configs(CONTEXT)[family]).float()
        widen(model, seed=7).save_pretrained(models / f"{family}.part")
        (models / f"{family}.part").rename(folder)
    return folder


def published(name: str, models: Path, device: str, *, num_layers: int | None = None) -> Path:
    """A random bfloat16 checkpoint of `published_models`, drawn on `device`; tied embeddings."""
    folder = models / (name if num_layers is None else f"{name}-{num_layers}")
    if folder.exists():
        return folder
    content = json.loads((PUBLISHED_MODELS / name / "config.json").read_text())
    content["tie_word_embeddings"] = True
    if num_layers is not None:
        content["num_hidden_layers"] = num_layers
    part = models / f"{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / "config.json").write_text(json.dumps(content))
    with torch.device("meta"), _without_fla():
        config = transformers.AutoConfig.from_pretrained(part)
        model = transformers.AutoModelForCausalLM.from_config(config)
    draw = torch.Generator(device).manual_seed(7)
    shard: dict[str, Tensor] = {}
    placed: dict[str, str] = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight":
            continue
        like = torch.ones(weight.shape, device=device)
        shard[key] = spread(key, like, draw).bfloat16().cpu()
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
