"""Facts of a model folder besides its tensors: where it is, how text ends, how it is sampled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.model_configs.generation import read_eos_token_ids
from engine.model_files import resolve_folder
from serving.api.served_model import SamplingDefaults, load_sampling_defaults

ROOT = Path(__file__).parents[3]


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def test_generation_config_wins_over_config(tmp_path: Path) -> None:
    write_config(tmp_path, {"eos_token_id": 3})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_eos_token_ids(tmp_path, 10) == (5, 6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (3,)),
        ({"eos_token_id": [1, 2]}, (1, 2)),
        ({"eos_token_id": None}, ()),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 9}}, (9,)),
    ],
)
def test_eos_falls_back_to_config(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_config(tmp_path, {"eos_token_id": 3, **changes})
    assert read_eos_token_ids(tmp_path, 10) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "generation_config.json is not JSON"),
        ("[]", "generation_config.json holds a list"),
        ('{"eos_token_id": "</s>"}', "eos_token_id.*</s>"),
        ('{"eos_token_id": [true]}', "eos_token_id"),
        (
            '{"eos_token_id": [3, 10]}',
            "generation_config.json: 'eos_token_id' 10 is outside 0 .. 9",
        ),
    ],
)
def test_broken_generation_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    write_config(tmp_path, {"eos_token_id": 3})
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_eos_token_ids(tmp_path, 10)


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults()
    values = {"eos_token_id": 5, "temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": None}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(values))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=1.0
    )
    for broken in ('{"temperature": "hot"}', '{"temperature": -5}', '{"top_p": 0}', "[" * 200_000):
        file.write_text(broken)
        with pytest.raises(CheckpointError, match=r"generation_config\.json.*"):
            load_sampling_defaults(tmp_path)


def test_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "~/nowhere-at-all"])
def test_missing_local_folder_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match=f"{model}.*not a folder"):
        resolve_folder(model)


def test_hub_name_without_a_network_is_a_clear_error(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its offline switch when it is imported."""
    code = (
        "from engine.errors import CheckpointError\n"
        "from engine.model_files import resolve_folder\n"
        "try:\n    resolve_folder('some-owner/some-model')\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    answer = run_python(code, offline)
    assert "'some-owner/some-model' is not a local folder" in answer


def test_config_half_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "import engine.families.registry, engine.model_configs.generation\n"
        "import engine.model_files\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    assert run_python(code, {}).strip() == "[]"


def run_python(code: str, extra: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=dict(os.environ) | extra,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
