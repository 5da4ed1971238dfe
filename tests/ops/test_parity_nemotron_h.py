"""Nemotron-H against transformers: logits and greedy tokens, however the work is cut."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM

from benchmarks.support.small_models import widen
from engine.model_configs.model_config import ModelConfig
from engine.models.loader import CausalLM
from tests.support.nodes.oracle import Runner, load

# float32 on both sides, logits up to 6. Measured differences are 4e-6 to 6e-5 and in each case no
# larger than three times transformers' own distance from its float64 run. Anything structural (a
# decay, gate, bias or state) moves logits by more than 0.01.
TOLERANCE = 3e-4
# Greedy tokens may differ only where transformers itself has a tie within its rounding.
TIE = 1e-3

# With this one, greedy text wanders through 17 to 56 different tokens instead of looping at once.
SEED = 6

VOCAB = 96
TOKENS = 150

# transformers 5.23 clamps dt from below at `time_step_min` in prefill only, and ignores
# `time_step_limit`; the models' original code, and ours, follow `time_step_limit`. So: tiny.
COMMON = {
    "vocab_size": VOCAB,
    "intermediate_size": 80,
    "time_step_min": 1e-9,
    "eos_token_id": None,
    "num_logits_to_keep": 1,
}


def settings(pattern: str, hidden: int, attention: tuple[int, ...], mamba: tuple[int, ...]) -> Any:
    """attention = (heads, kv heads, head dim), mamba = (heads, head dim, groups, state size)."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    mamba_names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    return {
        **COMMON,
        "hybrid_override_pattern": pattern,
        "hidden_size": hidden,
        **dict(zip(names, attention, strict=True)),
        **dict(zip(mamba_names, mamba, strict=True)),
    }


CASES = {
    "groups": settings("M-M*M-", 64, (4, 2, 16), (4, 16, 2, 16)),
    "odd-sizes": settings("MM*-M*", 48, (3, 1, 20), (6, 8, 1, 24)),
    "tied-many-groups": {
        **settings("-M*MM-", 64, (4, 4, 16), (8, 8, 4, 8)),
        "tie_word_embeddings": True,
    },
    "residual-in-float32": {
        **settings("M*-M", 32, (2, 2, 16), (2, 16, 1, 8)),
        "residual_in_fp32": True,
    },
    "biases": {
        **settings("*MM-", 32, (2, 1, 16), (4, 8, 1, 16)),
        "use_bias": True,
        "mlp_bias": True,
        "use_conv_bias": False,
        "conv_kernel": 3,
    },
}


@dataclass(slots=True)
class Pair:
    """One checkpoint in transformers and here, and what transformers computes for `prompts`."""

    theirs: NemotronHForCausalLM
    config: ModelConfig
    ours: CausalLM
    prompts: dict[int, list[int]]
    logits: dict[int, Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_checkpoint(case, folder, SEED)
    config, ours = load_ours(folder)
    draw = torch.Generator().manual_seed(7)
    prompts = {
        key: torch.randint(VOCAB, (count,), generator=draw).tolist()
        for key, count in enumerate((TOKENS, 77, 20, 65))
    }
    logits = {key: reference_logits(theirs, prompt) for key, prompt in prompts.items()}
    return Pair(theirs, config, ours, prompts, logits)


def save_checkpoint(case: dict[str, Any], folder: Path, seed: int) -> NemotronHForCausalLM:
    model = widen(NemotronHForCausalLM(NemotronHConfig(**case)), seed)
    if case.get("tie_word_embeddings"):
        # transformers 5.23 does not tie Nemotron-H even when its config asks for it.
        table = model.model.embeddings.weight.data.mul_(0.1)
        model.lm_head.weight.data.copy_(table)
    model.save_pretrained(folder)
    return model


def load_ours(folder: Path, dtype: str | None = None) -> tuple[ModelConfig, CausalLM]:
    return load(folder, dtype)


def reference_logits(model: NemotronHForCausalLM, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_same(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, atol=TOLERANCE, rtol=0.0)


def test_whole_prefill(pair: Pair) -> None:
    runner = Runner(pair.config, pair.ours)
    assert_same(runner.step({}, {0: pair.prompts[0]})[0], pair.logits[0])


@pytest.mark.parametrize("aligned", [False, True])
def test_odd_chunks_then_decodes(pair: Pair, aligned: bool) -> None:
    runner = Runner(pair.config, pair.ours, aligned=aligned)
    prompt = pair.prompts[0]
    borders = [0, 50, 51, 128, 140]
    parts = [runner.step({}, {0: prompt[start:end]})[0] for start, end in pairwise(borders)]
    parts += [runner.step({0: token})[0] for token in prompt[140:]]
    assert_same(torch.cat(parts), pair.logits[0])


@pytest.mark.parametrize("aligned", [False, True])
def test_mixed_batches(pair: Pair, aligned: bool) -> None:
    """Each step decodes sequences that are past their first half and prefills the others."""
    runner = Runner(pair.config, pair.ours, aligned=aligned)
    prompts = pair.prompts
    outputs: dict[int, list[Tensor]] = {key: [] for key in prompts}
    done = dict.fromkeys(prompts, 0)
    chunks = {0: 37, 1: 64, 2: 10, 3: 5}
    while any(done[key] < len(prompts[key]) for key in prompts):
        active = [key for key in prompts if done[key] < len(prompts[key])]
        decodes = {k: prompts[k][done[k]] for k in active if 2 * done[k] >= len(prompts[k])}
        prefills = {
            k: prompts[k][done[k] : done[k] + chunks[k]] for k in active if k not in decodes
        }
        for key, logits in runner.step(decodes, prefills).items():
            outputs[key].append(logits)
            done[key] += logits.shape[0]
    for key, parts in outputs.items():
        assert_same(torch.cat(parts), pair.logits[key])


def test_greedy_tokens(pair: Pair) -> None:
    prompt = pair.prompts[2]
    expected = pair.theirs.generate(
        torch.tensor([prompt]), max_new_tokens=200, do_sample=False, pad_token_id=0
    )[0].tolist()[len(prompt) :]
    runner = Runner(pair.config, pair.ours, aligned=True)
    logits = runner.step({}, {0: prompt})[0]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(runner.step({0: tokens[-1]})[0].argmax()))
    same = [ours == theirs for ours, theirs in zip(tokens, expected, strict=True)]
    if not all(same):
        first = same.index(False)
        top = reference_logits(pair.theirs, prompt + expected[:first])[-1].topk(2).values
        assert top[0] - top[1] < TIE, f"token {first} differs: {tokens[first]} {expected[first]}"


def test_bfloat16_stays_near_float32(pair: Pair, tmp_path: Path) -> None:
    """bfloat16 rounds at 0.4 %; over six layers, logits around 1 move by a few hundredths."""
    pair.theirs.save_pretrained(tmp_path)
    config, ours = load_ours(tmp_path, "bfloat16")
    runner = Runner(config, ours, aligned=True)
    prompt = pair.prompts[0]
    parts = [runner.step({}, {0: prompt[:130]})[0]]
    parts += [runner.step({0: token})[0] for token in prompt[130:]]
    error = (torch.cat(parts) - pair.logits[0]).abs()
    assert error.mean() < 0.1
    assert error.max() < 1.0


@pytest.mark.parametrize("aligned", [False, True])
def test_bfloat16_states_lose_only_rounding(pair: Pair, tmp_path: Path, aligned: bool) -> None:
    pair.theirs.config.mamba_ssm_cache_dtype = "bfloat16"
    pair.theirs.save_pretrained(tmp_path)
    config, ours = load_ours(tmp_path)
    runner = Runner(config, ours, aligned=aligned)
    prompt = pair.prompts[0]
    parts = [runner.step({}, {0: prompt[:100]})[0]]
    parts += [runner.step({0: token})[0] for token in prompt[100:]]
    error = (torch.cat(parts) - pair.logits[0]).abs()
    assert 0.0 < error.mean() < 0.02


def test_time_steps_stay_within_the_configured_limit(tmp_path: Path) -> None:
    """transformers ignores the limit in this family but clamps from below by `time_step_min`."""
    case = CASES["groups"] | {"time_step_min": 0.5}
    theirs = save_checkpoint(case, tmp_path, SEED)
    theirs.config.time_step_limit = [0.5, float("inf")]
    theirs.save_pretrained(tmp_path)
    prompt = list(range(VOCAB))
    config, ours = load_ours(tmp_path)
    runner = Runner(config, ours)
    parts = [runner.step({}, {0: prompt[:50]})[0]]
    parts += [runner.step({0: token})[0] for token in prompt[50:]]
    assert_same(torch.cat(parts), reference_logits(theirs, prompt))
