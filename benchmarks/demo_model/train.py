"""Trains the demo model on generated text and writes a Hugging Face checkpoint folder.

`python -m benchmarks.demo_model.train --minutes 28 --seed 0 --out deploy/demo/model`. Knows nothing
of the cluster. On a busy machine start it with OMP_WAIT_POLICY=PASSIVE, else threads spin for each
other.
"""

import benchmarks.support.without_fla  # noqa: F401  # isort: skip
import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from benchmarks.demo_model import text
from benchmarks.demo_model.evaluate import RESULTS_END, RESULTS_START, measure, update_card

VOCAB_SIZE = 832
END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CARD = """\
# Tandem demo model

A tiny hybrid language model (Qwen3.5 text format: three gated-delta-net layers, then one
full-attention layer; 2.04 M parameters, fp16) for demonstrations and tests. It tells little
stories and answers questions whose answers stand in the chat. A broken hand-off of K/V or Mamba
states between nodes shows as plainly wrong answers. It knows nothing of the world.

All text comes from `benchmarks/demo_model/text.py`; no outside data or weights were used.

| Training | |
| --- | --- |
| seed | {facts.seed} |
| time | {facts.minutes:g} minutes, {facts.threads} CPU thread(s) |
| steps, tokens | {facts.steps:,}, {facts.tokens:,} |
| final loss (answers weighted, smoothed) | {facts.loss:.3f} |
| optimizers | Muon for matrices, AdamW for the rest |

{start}
{end}

## Rebuild

    python -m benchmarks.demo_model.train --minutes {facts.minutes:g} --seed {facts.seed} \\
        --threads {facts.threads} --out deploy/demo/model
    python -m benchmarks.demo_model.evaluate deploy/demo/model --card

Training stops by the clock, so a rebuild gives a similar model, not the same bytes.
The text and the tokenizer depend on the seed alone.
"""
CONTEXT_WEIGHT, STORY_WEIGHT = 0.1, 0.3
MUON_RATE, ADAMW_RATE = 6e-3, 3e-3  # with Muon at 0.02 these small batches learn slower


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run: it lasts until `until` (share of the time) and fixes the data's size."""

    until: float
    rows: int
    length: int
    people: int
    turns: int


@dataclass(frozen=True, slots=True)
class Training:
    """Facts about a finished run; `loss` is the smoothed weighted loss."""

    seed: int
    minutes: float
    steps: int
    tokens: int
    loss: float
    threads: int


PHASES = (
    Phase(0.10, 8, 128, 2, 8),
    Phase(0.45, 8, 192, 3, 10),
    Phase(0.80, 8, 256, 4, 10),
    Phase(1.01, 4, 512, 6, 10),
)


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (whole byte alphabet, so any UTF-8 text) trained on generated text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = itertools.islice(text.training_documents(seed, 6, 6), 3000)
    core.train_from_iterator((_plain(*document) for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )


def _plain(system: str, exchanges: list[text.Exchange]) -> str:
    return "\n".join([system, *(f"{e.question}\n{e.answer}" for e in exchanges)])


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5TextConfig:
    """Three gated-delta-net layers and one full-attention layer, about two million parameters."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_model(config: Qwen3_5TextConfig) -> Qwen3_5ForCausalLM:
    """A fresh model; three starting points differ from the class and speed up learning to recall.

    Delta-net heads forget slowly, moderately and fast; convolution taps start wide, so that
    neighbours mix from the first step; embeddings are larger.
    """
    model = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.copy_(torch.tensor([0.02, 0.2, 2.0]).log())
        elif name.endswith("dt_bias"):
            parameter.data.zero_()
        elif "conv1d" in name:
            parameter.data.uniform_(-0.5, 0.5)
        elif "embed_tokens" in name:
            parameter.data.mul_(3.5)
    return model


def _turn(
    tokenizer: PreTrainedTokenizerFast, role: str, content: str, *, weight: float
) -> list[tuple[int, float]]:
    head = tokenizer.encode(f"{TURN_START}{role}\n")
    body = tokenizer.encode(f"{content}{TURN_END}")
    tail = tokenizer.encode("\n")
    return [
        *((token, 0.0) for token in head),
        *((token, weight) for token in body),
        *((token, 0.0) for token in tail),
    ]


def weighted_ids(
    tokenizer: PreTrainedTokenizerFast, system: str, exchanges: list[text.Exchange]
) -> list[tuple[int, float]]:
    """A document's token ids with their loss weights: high where an answer is determined."""
    if not exchanges:
        return [(token, STORY_WEIGHT) for token in tokenizer.encode(system + END_OF_TEXT)]
    weighted = _turn(tokenizer, "system", system, weight=CONTEXT_WEIGHT) if system else []
    for exchange in exchanges:
        weighted += _turn(tokenizer, "user", exchange.question, weight=CONTEXT_WEIGHT)
        speech = 1.0 if exchange.exact else STORY_WEIGHT
        weighted += _turn(tokenizer, "assistant", exchange.answer, weight=speech)
    return [*weighted, (tokenizer.pad_token_id, 0.0)]


def _rows(
    tokenizer: PreTrainedTokenizerFast, seed: int, phase: Phase
) -> Iterator[list[tuple[int, float]]]:
    row: list[tuple[int, float]] = []
    for document in text.training_documents(seed, phase.people, phase.turns):
        row += weighted_ids(tokenizer, *document)
        if len(row) > phase.length:
            yield row[: phase.length + 1]
            row = []


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, phase: Phase
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids int64, weights float32), both [rows, length + 1].

    A row starts with a whole document, later ones follow until the row is full.
    """
    rows = _rows(tokenizer, seed, phase)
    while True:
        taken = list(itertools.islice(rows, phase.rows))
        ids = torch.tensor([[token for token, _ in row] for row in taken])
        yield ids, torch.tensor([[weight for _, weight in row] for row in taken])


class Optimizer:
    """Muon (arXiv 2502.16982) for the weight matrices, AdamW for everything else."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        self.parameters = list(model.parameters())
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 8
            chosen = matrices if is_matrix and "embed" not in name else others
            chosen.append(parameter)
        muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01)
        adamw = torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.97), weight_decay=0.0)
        self.parts = [(muon, MUON_RATE), (adamw, ADAMW_RATE)]

    def step(self, share: float) -> None:
        """Update at `share` (0 to 1) of the peak rates, then clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part, peak in self.parts:
            part.param_groups[0]["lr"] = peak * share
            part.step()
            part.zero_grad(set_to_none=True)


def rate_share(progress: float) -> float:
    """Short warm-up, flat to 45 % of the time, then linear to (nearly) zero."""
    return min(1.0, progress / 0.02 + 0.02, max(0.01, (1.0 - progress) / 0.55))


def loss_of(model: Qwen3_5ForCausalLM, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of the next tokens; ids and weights are [rows, length + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    wanted = weights[:, 1:].flatten()
    return (losses * wanted).sum() / wanted.sum()


def train(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    *,
    minutes: float,
) -> Training:
    """Train for `minutes` of wall time with a progress bar; returns what the card needs."""
    optimizer = Optimizer(model)
    sources = [batches(tokenizer, seed + i, phase) for i, phase in enumerate(PHASES)]
    smooth, steps, tokens, started = 0.0, 0, 0, time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=1.0)
        while (progress := (time.monotonic() - started) / (60 * minutes)) < 1.0:
            source = next(s for s, p in zip(sources, PHASES, strict=True) if progress < p.until)
            ids, weights = next(source)
            loss = loss_of(model, ids, weights)
            torch.autograd.backward(loss)
            optimizer.step(rate_share(progress))
            smooth = loss.item() if steps == 0 else 0.98 * smooth + 0.02 * loss.item()
            steps, tokens = steps + 1, tokens + ids.numel()
            bar.update(task, completed=progress, description=f"step {steps} loss {smooth:.3f}")
            if steps % 100 == 0:
                bar.console.print(f"{progress:6.1%}  step {steps}  loss {smooth:.3f}")
    return Training(seed, minutes, steps, tokens, smooth, torch.get_num_threads())


def save(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the fp16 checkpoint folder in the Hugging Face layout."""
    model.generation_config = GenerationConfig.from_dict(
        {
            "do_sample": False,
            "eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id],
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_card(out: Path, facts: Training) -> None:
    """Write the model card, with a place where the measured rates go."""
    (out / "README.md").write_text(
        CARD.format(facts=facts, start=RESULTS_START, end=RESULTS_END), encoding="utf-8"
    )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--minutes", type=float, default=28.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("deploy/demo/model"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer(options.seed)
    model = build_model(build_config(tokenizer))
    facts = train(model, tokenizer, options.seed, minutes=options.minutes)
    save(model, tokenizer, options.out)
    write_card(options.out, facts)
    update_card(options.out, measure(options.out))


if __name__ == "__main__":
    main()
