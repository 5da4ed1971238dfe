"""Tensors that no model loads: skipped by one rule for all families, and told with their bytes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs
from torch import Tensor

from engine.errors import CheckpointError
from engine.families.registry import config_of
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.model_config import renamed
from tests.unit.engine.test_configs_qwen import QWEN3
from tests.unit.engine.test_model_loading import HUB_CONFIG, load, tensors, write_config

BLOCK = "self_attn.rotary_emb.inv_freq"
SKIPPED = (
    "mtp.fc.weight",
    "model.mtp.layers.0.norm.weight",
    "visual.blocks.0.attn.qkv.weight",
    "model.visual.merger.mlp.0.bias",
    "vision_tower.vision_model.post_layernorm.bias",
    "model.vision_tower.encoder.layers.0.norm.weight",
    "audio_tower.layers.0.fc1.weight",
    "multi_modal_projector.linear_1.weight",
    f"model.layers.3.{BLOCK}",
    "model.rotary_emb.inv_freq",
)
KEPT = ("model.norm.weight", "model.layers.0.mlp.visual.weight", "lm_head.weight")


def test_one_rule_for_all_families() -> None:
    assert [name for name in (*SKIPPED, *KEPT) if renamed(name, ())] == list(KEPT)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_modules"])
def test_layers_after_the_last_are_skipped_where_the_config_says_what_they_are(key: str) -> None:
    def kept(**said: int) -> list[int]:
        fields = QWEN3 | {"architectures": ["Qwen3ForCausalLM"], **said}
        renames = config_of(ConfigReader(fields, "config.json"), None).renames
        names = {number: f"model.layers.{number}.enorm.weight" for number in (3, 4, 5, 6, 40)}
        return [number for number, name in names.items() if renamed(name, renames)]

    assert kept() == [3, 4, 5, 6, 40]
    assert kept(**{key: 2}) == [3, 6, 40]


def store(folder: Path, extra: dict[str, Tensor]) -> None:
    write_config(folder, HUB_CONFIG, num_nextn_predict_layers=1)
    save_file(tensors() | extra, folder / "model.safetensors")


def test_what_is_skipped_is_told_with_its_bytes(tmp_path: Path) -> None:
    extra: dict[str, Tensor] = {
        "mtp.fc.weight": torch.ones(4),
        "mtp.layers.0.norm.weight": torch.ones(2, dtype=torch.bfloat16),
        f"backbone.layers.2.{BLOCK}": torch.ones(3),
        # The config names layers; this is the one after them.
        "backbone.layers.4.eh_proj.weight": torch.ones(5),
    }
    store(tmp_path, extra)
    with capture_logs() as logs:
        load(tmp_path)
    (line,) = (line for line in logs if "not used" in line["event"])
    assert line["bytes"] == {"mtp.": 20, "rotary_emb.inv_freq": 12, "model.layers.4.": 20}
    assert line["tensors"] == {"mtp.": 2, "rotary_emb.inv_freq": 1, "model.layers.4.": 1}


def test_a_folder_without_such_tensors_says_nothing(tmp_path: Path) -> None:
    store(tmp_path, {})
    with capture_logs() as logs:
        load(tmp_path)
    assert not [line for line in logs if "not used" in line["event"]]


# --- shards --------------------------------------------------------------------------------------


def write_shards(folder: Path, shards: dict[str, dict[str, Tensor]], *, named: list[str]) -> None:
    """All `shards`, and an index of those that are `named`."""
    write_config(folder, HUB_CONFIG)
    for file, stored in shards.items():
        save_file(stored, folder / file)
    weight_map = {name: file for file in named for name in shards[file]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path: Path) -> None:
    head = {"lm_head.weight": torch.ones(32, 16)}
    shards = {"model-1.safetensors": tensors(), "model-2.safetensors": head}
    write_shards(tmp_path, shards, named=list(shards))
    message = r"'lm_head\.weight' is in model-1\.safetensors and in model-2\.safetensors"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_shard_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    """Some folders hold the same weights once more, under other names."""
    whole = {"consolidated.safetensors": {"output.weight": torch.ones(2)}}
    write_shards(
        tmp_path, whole | {"model-1.safetensors": tensors()}, named=["model-1.safetensors"]
    )
    load(tmp_path)
