"""A stored `lm_head.weight` counts, whatever the config says of tying, as in transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from benchmarks.support.small_models import configs, widen
from tests.support.nodes.cluster import CONTEXT
from tests.support.nodes.oracle import Runner, load, reference_logits

TOKENS = [5, 300, 7, 7, 41, 2, 500, 13]
CONFIGS = configs(CONTEXT)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stored_head_counts_although_the_config_ties_it(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    config.tie_word_embeddings = False
    widen(transformers.AutoModelForCausalLM.from_config(config).float(), seed=7).save_pretrained(
        tmp_path
    )
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"tie_word_embeddings": True}))

    logits, logged = _logits(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    truth = reference_logits(reference, TOKENS)
    torch.testing.assert_close(logits, truth, atol=1e-3, rtol=1e-3)
    assert [entry["tensor"] for entry in logged] == ["lm_head.weight"]

    tensors = load_file(tmp_path / "model.safetensors")
    (table,) = [
        key for key in tensors if key.endswith(("embed_tokens.weight", "embeddings.weight"))
    ]
    tensors["lm_head.weight"] = tensors[table].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with_equal, logged = _logits(tmp_path)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    without, _ = _logits(tmp_path)
    assert torch.equal(with_equal, without)
    assert not torch.allclose(without, logits, atol=0.1)
    assert logged == []


def _logits(folder: Path) -> tuple[Tensor, list[dict[str, object]]]:
    """Of every token, and the warnings that were logged."""
    with capture_logs() as logged:
        config, model = load(folder)
    return Runner(config, model).step({}, {0: TOKENS})[0], [
        dict(entry) for entry in logged if entry["log_level"] == "warning"
    ]
