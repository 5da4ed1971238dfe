"""The demo model's exact answers, intact and with parts of its cache wiped.

`python -m benchmarks.demo_model.evaluate deploy/demo/model [--card]`. Runs on `transformers` alone,
so the numbers say what a correct (or a broken) hand-off looks like; knows nothing of the cluster.
"""

import benchmarks.support.without_fla  # noqa: F401  # isort: skip
import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from benchmarks.demo_model.text import FreshPrompt, fresh_prompts

WIPES = ("nothing", "K/V", "conv states", "temporal states")
RESULTS_START, RESULTS_END = "<!-- results -->", "<!-- /results -->"
FRESH_SEED, FRESH_COUNT, MAX_NEW_TOKENS = 1000, 200, 120


@dataclass(frozen=True, slots=True)
class Report:
    """Exact answers per kind of wipe; `asked` and `right` split the intact run by question."""

    count: int
    exact: dict[str, int]
    asked: Counter[str]
    right: Counter[str]


def load(folder: Path) -> tuple[Qwen3_5ForCausalLM, PreTrainedTokenizerFast]:
    """The saved fp16 weights, computed in fp32, and the saved tokenizer."""
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train(False), PreTrainedTokenizerFast.from_pretrained(folder)


def wipe(cache: Cache, what: str) -> None:
    """Zero one part (a name in `WIPES`) of every layer of a transformers cache, in place."""
    for layer in cache.layers:
        wiped: list[Tensor | None] = []
        if isinstance(layer, LinearAttentionLayer):
            states = {"conv states": layer.conv_states, "temporal states": layer.recurrent_states}
            wiped = list(states.get(what, {}).values())
        elif isinstance(layer, DynamicLayer) and what == "K/V":
            wiped = [layer.keys, layer.values]
        for tensor in wiped:
            if tensor is not None:
                tensor.zero_()


@torch.inference_mode()
def answer(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: FreshPrompt,
    *,
    wiped: str = "nothing",
) -> str:
    """Greedy answer; the wipe happens after the prompt's prefill, before the first decode step."""
    chat = tokenizer.apply_chat_template(
        prompt.messages, tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(chat)])
    out = model(input_ids=ids, use_cache=True)
    wipe(out.past_key_values, wiped)
    said: list[int] = []
    while len(said) < MAX_NEW_TOKENS:
        token = int(out.logits[0, -1].argmax())
        if token in model.generation_config.eos_token_id:
            break
        said.append(token)
        step = torch.tensor([[token]])
        out = model(input_ids=step, past_key_values=out.past_key_values, use_cache=True)
    return str(tokenizer.decode(said))


def measure(folder: Path) -> Report:
    """Ask `FRESH_COUNT` fresh prompts once per kind of wipe (one to two minutes on one thread)."""
    model, tokenizer = load(folder)
    prompts = fresh_prompts(FRESH_SEED, FRESH_COUNT)
    exact = dict.fromkeys(WIPES, 0)
    right: Counter[str] = Counter()
    for prompt in prompts:
        for wiped in WIPES:
            hit = answer(model, tokenizer, prompt, wiped=wiped) == prompt.answer
            exact[wiped] += hit
            right[prompt.kind] += hit and wiped == "nothing"
    return Report(len(prompts), exact, Counter(prompt.kind for prompt in prompts), right)


def results(report: Report) -> str:
    """The report as Markdown, for the model card."""
    rows = [f"| {wiped} | {hits / report.count:.1%} |" for wiped, hits in report.exact.items()]
    kinds = [f"{kind} {report.right[kind]}/{n}" for kind, n in report.asked.most_common()]
    return "\n".join(
        (
            f"Greedy answers to {report.count} fresh prompts (seed {FRESH_SEED}, not filtered "
            "against the training text), saved weights computed in fp32:",
            "",
            "| wiped between prefill and decode | exact answers |",
            "| --- | --- |",
            *rows,
            "",
            f"Intact, by question: {', '.join(kinds)}.",
        )
    )


def update_card(folder: Path, report: Report) -> None:
    """Put the report between the result marks of the folder's model card."""
    card = folder / "README.md"
    before, _, rest = card.read_text(encoding="utf-8").partition(RESULTS_START)
    after = rest.partition(RESULTS_END)[2]
    body = f"{before}{RESULTS_START}\n{results(report)}\n{RESULTS_END}{after}"
    card.write_text(body, encoding="utf-8")


def show(report: Report) -> None:
    """Print the report as tables."""
    console = Console()
    table = Table("wiped between prefill and decode", "exact answers")
    for wiped, hits in report.exact.items():
        table.add_row(wiped, f"{hits}/{report.count} = {hits / report.count:.1%}")
    console.print(table)
    kinds = Table("question", "intact: right", "asked")
    for kind, asked in report.asked.most_common():
        kinds.add_row(kind, str(report.right[kind]), str(asked))
    console.print(kinds)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Measure the demo model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--card", action="store_true", help="write the numbers to the model card")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure(options.folder)
    show(report)
    if options.card:
        update_card(options.folder, report)


if __name__ == "__main__":
    main()
