"""Qwen3 and Qwen3.5 against transformers in float32: same files, same logits, same greedy tokens.

Tolerance: eight times the distance of the reference from itself when it takes tokens one by one
instead of in one go (its chunked against its recurrent form), because that is what float32 rounding
does to these logits.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.model_configs.base import ModelConfig
from engine.models.registry import FAMILIES, CausalLM, Family
from tests.oracle import (
    Runner,
    first_wrong_choice,
    load,
    reference_logits,
    rounding_error,
    widen,
)

QWEN3 = FAMILIES["Qwen3ForCausalLM"]
QWEN3_5 = FAMILIES["Qwen3_5ForCausalLM"]
VOCAB = 97
LENGTH = 300
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


MODELS: dict[str, tuple[Family, Any, Any]] = {
    "qwen3-plain": (QWEN3, qwen3_plain, spell_the_old_way),
    "qwen3-tied": (QWEN3, qwen3_tied, None),
    "qwen3-ungrouped": (QWEN3, qwen3_ungrouped, None),
    "qwen3_5-plain": (QWEN3_5, qwen3_5_plain, None),
    "qwen3_5-tied": (QWEN3_5, qwen3_5_tied, None),
    "qwen3_5-wrapped": (QWEN3_5, qwen3_5_wrapped, add_mtp_head),
}


@dataclass(slots=True)
class Pair:
    """A reference and our model of the same folder, and what the reference says of a sequence."""

    reference: PreTrainedModel
    config: ModelConfig
    model: CausalLM
    tokens: list[int]
    logits: Tensor
    tolerance: float

    def check(self, got: Tensor, start: int = 0) -> None:
        expected = self.logits[start : start + len(got)]
        assert float((got - expected).abs().max()) < self.tolerance


@pytest.fixture(scope="module", params=list(MODELS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    family, build, edit = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    widen(build(), seed=7).save_pretrained(folder)
    reference = type(build()).from_pretrained(folder).eval()
    if edit is not None:
        edit(folder)
    config, model = load(family, folder)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=draw).tolist()
    tolerance = 8 * rounding_error(reference, tokens[:100])
    yield Pair(reference, config, model, tokens, reference_logits(reference, tokens), tolerance)
    torch.set_num_threads(threads)


def test_the_tolerance_means_something(pair: Pair) -> None:
    """Rounding differs between processors (2e-4 was seen); a wrong op costs percents."""
    assert 0 < pair.tolerance < 1e-3 * float(pair.logits.abs().max())


def test_whole_prefill(pair: Pair) -> None:
    pair.check(Runner(pair.config, pair.model).step({}, {0: pair.tokens})[0])


def test_chunked_prefill(pair: Pair) -> None:
    runner = Runner(pair.config, pair.model)
    parts = [runner.step({}, {0: part})[0] for part in _cut(pair.tokens, [50, 1, 129, 120])]
    pair.check(torch.cat(parts))


def test_decode_after_prefill(pair: Pair) -> None:
    runner = Runner(pair.config, pair.model)
    runner.step({}, {0: pair.tokens[:70]})
    rows = [runner.step({0: token})[0] for token in pair.tokens[70:110]]
    pair.check(torch.cat(rows), 70)


@pytest.mark.parametrize("aligned", [False, True])
def test_mixed_batches(pair: Pair, aligned: bool) -> None:
    """Sequences decode, prefill in chunks and start in the same steps; all prefixes of a text."""
    runner = Runner(pair.config, pair.model, aligned=aligned)
    t = pair.tokens
    done = {key: 0 for key in range(5)}
    steps: list[tuple[list[int], dict[int, int]]] = [
        ([], {0: 65, 1: 1, 2: 15}),
        ([0, 1, 2], {3: 64}),
        ([0, 2], {1: 70, 3: 1, 4: 200}),
        ([4], {0: 2}),
        ([0, 1, 2, 3, 4], {}),
        ([4, 3, 2, 1, 0], {}),
    ]
    for decoding, chunks in steps:
        decodes = {key: t[done[key]] for key in decoding}
        prefills = {key: t[done[key] : done[key] + n] for key, n in chunks.items()}
        for key, logits in runner.step(decodes, prefills).items():
            pair.check(logits, done[key])
            done[key] += len(logits)


@pytest.mark.parametrize("aligned", [False, True])
def test_greedy_tokens(pair: Pair, aligned: bool) -> None:
    runner = Runner(pair.config, pair.model, aligned=aligned)
    prompts = dict(enumerate([pair.tokens[:33], pair.tokens[40:41], pair.tokens[100:229]]))
    for key, chosen in runner.greedy(prompts, 200).items():
        assert first_wrong_choice(pair.reference, prompts[key], chosen, margin=1e-3) is None


def _cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor(tokens).split_with_sizes(sizes)]
