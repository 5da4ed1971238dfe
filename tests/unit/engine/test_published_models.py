"""Every config.json in `benchmarks/published_models`: the model and the bytes that it says.

Word for word as published: Qwen3-8B, Qwen3-30B-A3B, Qwen3-Next-80B-A3B, Nemotron-3-Nano-30B-A3B,
and Qwen3.5-35B-A3B as a model that was trained on from it has it. Nemotron-3-Super is its NVFP4
release without `quantization_config`, Gemma-3-12B is without a version. Of Qwen3.5-4B,
Nemotron-H-8B, Granite-4.0-H-Tiny and Falcon-H1-7B the files have only what decides sizes.

Of later families: Kimi-Linear and Jamba-1.5-Mini word for word, LFM2-1.2B without a version. Of
LFM2-8B-A1B and MiniMax-Text-01 (as transformers names its settings) what others quote.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.support.model_folders import PUBLISHED_MODELS
from benchmarks.support.small_models import widen
from engine.errors import TandemError
from engine.families.registry import config_of, read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.report import plan_report
from engine.kv_cache.spec import MambaSpec
from engine.model_configs.config_reader import ConfigReader
from tests.support.nodes.oracle import Runner, load, reference_logits, rounding_errors
from tests.support.nodes.shrunk import PLAIN, shrunk
from tests.tiers import everyday

# By model, for each group of layers: how many, and the bytes that one of them keeps in bfloat16,
# of a token (K and V: 2 * heads * channels * 2) or of a sequence (states: convolution rows in
# bfloat16, 3 * channels * 2; and what is in float32, heads * channels * state * 4).
GATED_DELTA = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4
GROUPS = {
    "Qwen3-8B": {"tokens": (36, 2 * 8 * 128 * 2)},
    "Qwen3-30B-A3B": {"tokens": (48, 2 * 4 * 128 * 2)},
    "Qwen3.5-4B": {"state": (24, GATED_DELTA), "tokens": (8, 2 * 4 * 256 * 2)},
    "Qwen3.5-35B-A3B": {"state": (30, GATED_DELTA), "tokens": (10, 2 * 2 * 256 * 2)},
    "Qwen3-Next-80B-A3B": {"state": (36, GATED_DELTA), "tokens": (12, 2 * 2 * 256 * 2)},
    "Nemotron-H-8B": {
        "state": (24, 3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4),
        "tokens": (4, 2 * 8 * 128 * 2),
    },
    "Nemotron-3-Nano-30B-A3B": {
        "state": (23, 3 * (64 * 64 + 2 * 8 * 128) * 2 + 64 * 64 * 128 * 4),
        "tokens": (6, 2 * 2 * 128 * 2),
    },
    "Nemotron-3-Super-120B-A12B": {
        "state": (40, 3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4),
        "tokens": (8, 2 * 2 * 128 * 2),
    },
    "Gemma-3-12B": {"window 1024": (40, 2 * 8 * 256 * 2), "tokens": (8, 2 * 8 * 256 * 2)},
    "Granite-4.0-H-Tiny": {
        "state": (36, 3 * (48 * 64 + 2 * 128) * 2 + 48 * 64 * 128 * 4),
        "tokens": (4, 2 * 4 * 128 * 2),
    },
    "Falcon-H1-7B": {
        "state": (44, 3 * (24 * 128 + 2 * 256) * 2 + 24 * 128 * 256 * 4),
        "tokens": (44, 2 * 2 * 128 * 2),
    },
    "LFM2-1.2B": {"state": (10, 2 * 2048 * 2), "tokens": (6, 2 * 8 * 64 * 2)},
    "LFM2-8B-A1B": {"state": (18, 2 * 2048 * 2), "tokens": (6, 2 * 8 * 64 * 2)},
    "MiniMax-Text-01": {"state": (70, 64 * 128 * 128 * 4), "tokens": (10, 2 * 8 * 128 * 2)},
    "Jamba-1.5-Mini": {
        "state": (28, 3 * 8192 * 2 + 8192 * 16 * 4),
        "tokens": (4, 2 * 8 * 128 * 2),
    },
    "Kimi-Linear-48B-A3B": {
        "state": (20, 3 * (3 * 32 * 128) * 2 + 32 * 128 * 128 * 4),
        "tokens": (7, (512 + 64) * 2),
    },
}
# The part of a unit that a state leaves empty, where it is not hardly any: LFM2's states are less
# than 16 tokens of K and V.
WASTE = {"LFM2-1.2B": 0.6, "LFM2-8B-A1B": 0.25}
# What transformers 5.23 computes otherwise than the models' own code, by `model_type`.
REFERENCE = {
    "nemotron_h": {"time_step_min": 1e-9},  # it clamps steps from below, in prefill alone
}
TOKENS = 48
DAILY = (
    "Qwen3.5-35B-A3B",
    "Nemotron-3-Super-120B-A12B",
    "Gemma-3-12B",
    "Falcon-H1-7B",
    "LFM2-8B-A1B",
    "MiniMax-Text-01",
    "Jamba-1.5-Mini",
    "Kimi-Linear-48B-A3B",
)


def test_every_file_is_checked() -> None:
    assert {folder.name for folder in PUBLISHED_MODELS.iterdir()} == set(GROUPS)


@pytest.mark.parametrize("name", GROUPS)
def test_layers_and_bytes_of_the_published_sizes(name: str) -> None:
    """And blocks of 16 tokens waste little, even beside large states."""
    plan = plan_arena(read_config(PUBLISHED_MODELS / name).groups, 16, 16 << 30)
    found = {}
    for group in plan.groups:
        spec = group.spec
        if isinstance(spec, MambaSpec):
            found["state"] = (len(group.layers), spec.layer_bytes)
        else:
            window = getattr(spec, "window", None)
            kind = "tokens" if window is None else f"window {window}"
            found[kind] = (len(group.layers), spec.page_bytes(1))
    assert found == GROUPS[name]
    numbers = range(len(plan.groups))
    assert all(plan.block_size_of(number) == 16 for number in numbers)
    assert all(plan.blocks_for(number, 12) == 1 for number in numbers)
    assert max(map(plan.waste, numbers)) <= WASTE.get(name, 0.03), plan_report(plan, 4096)


# Every day the newest file of each kind of part; older ones have the same parts, or fewer.
@pytest.mark.parametrize("name", everyday(GROUPS, DAILY))
def test_all_its_keys_load_and_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """In chunks; sizes are smaller and layers fewer, the settings are those that are published."""
    fields = shrunk(json.loads((PUBLISHED_MODELS / name / "config.json").read_text()))
    reference = save(fields, tmp_path)
    config, model = load(tmp_path, "float32")
    # A seed by which no token has two experts so near that rounding would swap them.
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(PLAIN, (TOKENS,), generator=draw).tolist()
    expected = reference_logits(reference, tokens)
    runner = Runner(config, model)
    got = torch.cat([runner.step({}, {0: part})[0] for part in (tokens[:29], tokens[29:])])
    assert got.isfinite().all()
    scale = float(expected.abs().max())
    tolerance = 8 * float(rounding_errors(reference, tokens).max())
    assert tolerance < 1e-3 * scale
    assert float((got - expected).abs().max()) < tolerance


def save(fields: dict[str, object], folder: Path) -> PreTrainedModel:
    """A random checkpoint under the hub's names, with `fields` as its config.json."""
    text = json.dumps(fields)
    (folder / "config.json").write_text(text)
    changes = REFERENCE.get(str(fields["model_type"]), {})
    config = transformers.AutoConfig.from_pretrained(folder, **changes)
    names = fields["architectures"]
    assert isinstance(names, list)
    model = widen(getattr(transformers, names[0])(config).float(), seed=7)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    return model


NOT_NUMBERS: tuple[Any, ...] = (float("nan"), float("inf"), "x", None, [], [None], {})
STRANGE: tuple[Any, ...] = (0, -1, 1, 2**40, 2**70, 0.5, -0.5, *NOT_NUMBERS)


@pytest.mark.parametrize("name", GROUPS)
def test_strange_values_are_refused_or_planned(name: str) -> None:
    """Every value of the file in turn: an error that is ours, or a plan; nothing else, no hang."""
    fields = json.loads((PUBLISHED_MODELS / name / "config.json").read_text())
    for path in _paths(fields):
        for value in STRANGE:
            changed = copy.deepcopy(fields)
            owner = changed
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = value
            with suppress(TandemError):
                config = config_of(ConfigReader(changed, "config.json"), None)
                plan = plan_arena(config.groups, 16, 1 << 30)
                assert plan_report(plan, config.max_position_embeddings)


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """The keys on the way to each value, of lists to the first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, below in inner:
        yield (key,)
        if isinstance(below, dict | list):
            yield from ((key, *rest) for rest in _paths(below))
