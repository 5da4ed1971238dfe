"""`python -m benchmarks.engine.engine_vs_transformers`: tokens/s of engine and `generate`.

Both run in one process on one core with one torch thread, on the same float32 checkpoint, greedily
and without an end token; rounds alternate. Ours is a node: event loop, engine thread, scheduler,
paged arena. Theirs is `transformers.generate` with its cache.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import msgspec
import torch
import transformers
import typer

from benchmarks.support import machine, report
from benchmarks.support.family_models import FAMILIES, SHARED
from benchmarks.support.floors import stream_floor
from benchmarks.support.models import load_reference, save_random, weight_bytes
from benchmarks.support.pairs import Spread, alternate, turns
from benchmarks.support.plots import grouped_bars
from benchmarks.support.tandem_engine import TandemNode, Timing
from benchmarks.support.work import BATCHES, DECODE, PREFILL, Work

SECONDS = (900, 60)
DECODE_TOKENS = 96
TARGETS = {DECODE: 1.5, PREFILL: 1.0}
HEADERS = (
    "case",
    "Tandem tok/s",
    "transformers tok/s",
    "ratio (min-max)",
    "target",
    "floor tok/s",
    "of the floor",
)


class Case(msgspec.Struct, frozen=True):
    """One measurement: a phase at a batch size."""

    model: str
    work: Work

    @property
    def name(self) -> str:
        """`gdn decode, batch 8`."""
        return f"{self.model} {self.work.name}"


class Row(msgspec.Struct, frozen=True):
    """Tokens per second of both sides, their ratio by round, and the weight-streaming floor."""

    case: Case
    tandem: Spread
    transformers: Spread
    ratio: Spread
    floor: Spread


@dataclass(slots=True, frozen=True)
class Sides:
    """One checkpoint in both engines."""

    node: TandemNode
    reference: Any


@contextmanager
def both_sides(checkpoint: Path) -> Iterator[Sides]:
    """Ours is closed with the block."""
    with TandemNode(checkpoint) as node:
        yield Sides(node, load_reference(checkpoint))


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when each token has been appended; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate_reference(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
    """The batch through transformers' `generate`."""
    clock = _Clock()
    started = perf_counter()
    input_ids = torch.tensor(prompts)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
    )
    return Timing.of(started, [clock.times] * len(prompts))


def cases_of(model: str, batches: Sequence[int]) -> list[Case]:
    """Prefill, then decode at every batch size."""
    decodes = (Work(DECODE, batch, DECODE_TOKENS) for batch in batches)
    return [Case(model, work) for work in (Work(PREFILL, 1, 1), *decodes)]


def measure(
    case: Case, sides: Sides, rounds: int, *, until: float, done: Callable[[], None]
) -> Row:
    """One case in alternating rounds; the floor's bandwidth is measured in each of them."""
    work = case.work
    prompts, tokens = work.prompts(SHARED["vocab_size"]), work.new_tokens
    nbytes = weight_bytes(sides.reference)
    ways = {
        "tandem": lambda: work.rate(sides.node.generate(prompts, tokens)),
        "transformers": lambda: work.rate(generate_reference(sides.reference, prompts, tokens)),
        "floor": lambda: stream_floor(work, nbytes),
    }
    rates = alternate(ways, rounds, until=until, done=done)
    spreads = {name: Spread.of(values) for name, values in rates.items()}
    return Row(
        case,
        spreads["tandem"],
        spreads["transformers"],
        Spread.of_ratio(rates["tandem"], rates["transformers"]),
        spreads["floor"],
    )


def run(
    models: Sequence[str], rounds: int, found: report.Report, *, batches: Sequence[int]
) -> list[Row]:
    """All cases of all models."""
    left = sum(len(cases_of(name, batches)) for name in models)
    total = left * 3 * turns(rounds)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        report.progress(found.console, total) as describe,
    ):
        for name in models:
            with both_sides(save_random(name, Path(folder))) as sides:
                first = len(rows)
                rows += [
                    measure(
                        case,
                        sides,
                        rounds,
                        until=found.share(left - place),
                        done=describe(case.name),
                    )
                    for place, case in enumerate(cases_of(name, batches), first)
                ]
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    target = TARGETS[row.case.work.phase]
    verdict = "met" if row.ratio.median >= target else "MISSED"
    return [
        row.case.name,
        f"{row.tandem.median:,.0f}",
        f"{row.transformers.median:,.0f}",
        row.ratio.show(),
        f">= {target} {verdict}",
        f"{row.floor.median:,.0f}",
        f"{row.tandem.median / row.floor.median:.1%}",
    ]


def plot(rows: Sequence[Row], file: Path) -> None:
    """Ratios as bars by model, one per case."""
    ratios: dict[str, list[Spread]] = {}
    for row in rows:
        ratios.setdefault(row.case.work.name, []).append(row.ratio)
    models = list(dict.fromkeys(row.case.model for row in rows))
    grouped_bars(file, models, ratios, ylabel="tokens/s, Tandem / transformers")


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one warm-up.")] = 7,
    models: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(FAMILIES)}; may be repeated. [all]")
    ] = None,
    cpu: Annotated[str, typer.Option(help="Core to run on, or `all`.")] = "0",
    onednn_matmul: Annotated[
        bool, typer.Option("--onednn-matmul", help="torch's faster product on AMD, for both sides.")
    ] = False,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Prefill and decode speed of the whole engine beside transformers' generate."""
    for name in models or ():
        if name not in FAMILIES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(FAMILIES)}")
    found = report.Report("engine_vs_transformers", out, SECONDS, cpu=cpu, quick=quick)
    if onednn_matmul:
        machine.use_onednn_matmul()
    chosen, batches = models or list(FAMILIES), list(BATCHES)
    if quick:
        rounds, chosen, batches = 1, chosen[:1], batches[:1]
    rows = run(chosen, rounds, found, batches=batches)
    note = (
        f"float32 through {'oneDNN' if onednn_matmul else 'MKL'} where torch chooses, "
        f"median of at most {rounds} rounds; {machine.describe(found.host)}; "
        "floor: all weights read once per step at the bandwidth measured in the same rounds"
    )
    found.publish(
        "Engine and transformers", headers=HEADERS, rows=list(map(cells, rows)), note=note
    )
    plot(rows, found.plot())
    found.save(rows)


if __name__ == "__main__":
    typer.run(main)
