"""`python -m benchmarks.engine.prefill_length`: how a prefill's time grows with its prompt.

One prompt of 32,768 tokens on a bare core, in chunks of 2,048, one a step. States and products take
the same time at any place of a prompt; attention reads all tokens before it. So a step is split in
two by the clock around the native kernels of attention:

    step at context c  =  attention, which grows with c  +  all the rest, which must not

`rest, ratio`: to the step at context 0 of the same round.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import torch
import typer

from benchmarks.support import machine, report
from benchmarks.support.kernel_times import timed_kernels
from benchmarks.support.large_models import LARGE_VOCABULARY
from benchmarks.support.models import random_prompts, save_random
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import curves
from benchmarks.support.tandem_engine import BareCore, request_of
from engine.native.kernels import load_kernels
from serving.config import NodeConfig

SECONDS = (600, 60)
MODELS = ("granite", "qwen3_5")
QUICK_MODEL = "mamba2"
CHUNK = 2048
LENGTHS = (32_768, 4096)
ARENA_BYTES = 1 << 30
HEADERS = ("case", "context", "step ms", "attention ms", "rest ms", "rest, ratio (min-max)")


class Step(msgspec.Struct, frozen=True):
    """One chunk, in milliseconds."""

    whole: float
    attention: float

    @property
    def rest(self) -> float:
        return self.whole - self.attention


class Row(msgspec.Struct, frozen=True):
    """The chunks after `context` tokens of all rounds, in milliseconds."""

    model: str
    context: int
    whole: Spread
    attention: Spread
    rest: Spread
    ratio: Spread


def prefill(core: BareCore, number: int, length: int) -> list[Step]:
    """All steps of one prompt of `length` tokens."""
    (prompt,) = random_prompts(1, length, seed=number)
    core.add(request_of(number, [token % LARGE_VOCABULARY for token in prompt], 1))
    steps = []
    while core.scheduler.has_work:
        with timed_kernels() as seen:
            started = perf_counter()
            core.core.step()
            whole = 1e3 * (perf_counter() - started)
        steps.append(Step(whole, sum(it.us for it in seen if "attention" in it.name) / 1e3))
    return steps


def rows_of(model: str, rounds: Sequence[Sequence[Step]]) -> list[Row]:
    """One row per chunk."""
    rows = []
    for number, steps in enumerate(zip(*rounds, strict=True)):
        rest = [step.rest for step in steps]
        rows.append(
            Row(
                model,
                number * CHUNK,
                Spread.of([step.whole for step in steps]),
                Spread.of([step.attention for step in steps]),
                Spread.of(rest),
                Spread.of_ratio(rest, [first[0].rest for first in rounds]),
            )
        )
    return rows


def shown(rows: Sequence[Row]) -> list[Row]:
    """Of each model the first chunk and those after 1, 3, 7 and so on: contexts that double."""
    return [row for row in rows if (chunks := row.context // CHUNK + 1) & (chunks - 1) == 0]


def measure(
    checkpoint: Path, rounds: int, length: int, *, done: Callable[[], None]
) -> list[list[Step]]:
    """The steps of `rounds` prompts of `length` tokens, after a short one that warms up."""
    options = NodeConfig(
        dtype="bfloat16",
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=ARENA_BYTES,
    )
    prompts = []
    with BareCore(checkpoint, options) as core:
        prefill(core, 0, CHUNK)
        for number in range(rounds):
            prompts.append(prefill(core, number + 1, length))
            done()
    return prompts


def run(models: Sequence[str], rounds: int, length: int, *, found: report.Report) -> list[Row]:
    """Prompts of `length` tokens through every model, one after the other."""
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        report.progress(found.console, len(models) * rounds) as describe,
    ):
        for name in models:
            done = describe(name)
            checkpoint = save_random(name, Path(folder))
            rows += rows_of(name, measure(checkpoint, rounds, length, done=done))
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    parts = (row.whole, row.attention, row.rest)
    milliseconds = [f"{part.median:,.0f}" for part in parts]
    return [row.model, f"{row.context:,}", *milliseconds, row.ratio.show()]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts per model.")] = 2,
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}. [all]")] = None,
    cpu: Annotated[str, typer.Option(help="Core to run on, or `all`.")] = "0",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Milliseconds of a prompt's chunks, attention apart from the rest."""
    if load_kernels(torch.bfloat16) is None:
        raise typer.BadParameter("native kernels do not run here, and only they are timed apart")
    models, length = model or list(MODELS), LENGTHS[quick]
    if quick:
        rounds, models = 1, [QUICK_MODEL]
    found = report.Report("prefill_length", out, SECONDS, cpu=cpu, quick=quick)
    rows = run(models, rounds, length, found=found)
    note = f"chunks of {CHUNK:,}; {rounds} prompts each; {machine.describe(found.host)}"
    found.publish(
        "Prefill by context", headers=HEADERS, rows=list(map(cells, shown(rows))), note=note
    )
    panels = {
        name: {
            "attention": [(row.context, row.attention.median) for row in rows if row.model == name],
            "rest": [(row.context, row.rest.median) for row in rows if row.model == name],
        }
        for name in models
    }
    curves(found.plot(), panels, xlabel="context, tokens", ylabel="ms per chunk", log_x=False)
    found.save(rows)


if __name__ == "__main__":
    typer.run(main)
