"""Logits of int8 weights: bounds that operations.md states, for native kernels and torch.

Random models amplify any rounding, each by its own factor; bfloat16 says how much.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_model.text import conversation, to_messages
from benchmarks.support.small_models import VOCABULARY, configs, widen
from engine.compute_config import ComputeConfig, KernelChoice
from engine.families.registry import read_config
from engine.models.loader import load_model
from tests.support.nodes.oracle import Runner

DEMO = Path(__file__).parents[2] / "deploy/demo/model"
KERNELS = pytest.mark.parametrize("kernels", ["auto", "torch"])


def logits_of(
    folder: Path, texts: Sequence[list[int]], compute: ComputeConfig, dtype: str = "float32"
) -> Tensor:
    """[tokens of all texts, vocab]."""
    config = read_config(folder, dtype)
    runner = Runner(config, load_model(folder, config, torch.device("cpu"), compute=compute))
    rows = [runner.step({}, {key: text})[key] for key, text in enumerate(texts)]
    return torch.cat(rows).float()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Root of mean squares; logits count from their mean, since softmax does not see it."""
    spread = wanted - wanted.mean(1, keepdim=True)
    return float((found - wanted).norm() / spread.norm())


def perplexity(logits: Tensor, texts: Sequence[list[int]]) -> float:
    parts = zip(logits.log_softmax(1).split_with_sizes([*map(len, texts)]), texts, strict=True)
    told = [rows[:-1].gather(1, torch.tensor(text[1:])[:, None]) for rows, text in parts]
    return float(torch.cat(told).mean().neg().exp())


@KERNELS
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "gemma3"])
def test_the_error_is_at_most_four_times_that_of_bfloat16(
    tmp_path: Path, family: str, kernels: KernelChoice
) -> None:
    widen(AutoModelForCausalLM.from_config(configs(1024)[family]), 7).save_pretrained(tmp_path)
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(VOCABULARY, (300,), generator=draw).tolist()]
    exact = logits_of(tmp_path, texts, ComputeConfig(kernels))
    rounded = logits_of(tmp_path, texts, ComputeConfig(kernels), "bfloat16")
    error = relative_error(logits_of(tmp_path, texts, ComputeConfig(kernels, "int8")), exact)
    assert 0.0 < error < 4 * relative_error(rounded, exact)


@KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_says_the_same(kernels: KernelChoice, dtype: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)
    talks = [to_messages(*conversation(Random(1000 + seed), 3, 3)) for seed in range(8)]
    texts = [tokenizer.encode(tokenizer.apply_chat_template(it, tokenize=False)) for it in talks]
    exact = logits_of(DEMO, texts, ComputeConfig(kernels))
    found = logits_of(DEMO, texts, ComputeConfig(kernels, "int8"), dtype)
    assert 0.0 < relative_error(found, exact) < 0.03
    assert (found.argmax(1) == exact.argmax(1)).float().mean() > 0.96
    assert perplexity(found, texts) == pytest.approx(perplexity(exact, texts), rel=0.01)
