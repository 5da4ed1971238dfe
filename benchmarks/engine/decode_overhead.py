"""`python -m benchmarks.engine.decode_overhead`: what a decode step costs outside of operators.

The step is all of `EngineCore.step`: schedule, build the batch, forward, sample, update. Its time
is taken twice, in alternating rounds of a few steps whose fastest counts:

- `wall`: by the clock, with nothing attached.
- `ops`: under torch.profiler, the sum over top-level operators (those not called by another one)
  of the time between their entry and their exit in C++; and the native kernels, by the clock
  around each call: a recorded forward pass is one.

overhead = wall - ops: Python in scheduler, layers and sampler, the bindings' parsing and wrapping
of arguments, the allocator of Python objects. It does not count dispatch inside an operator (about
1 us each), which no engine in eager mode can avoid; the last column gives the number of operators
and calls of kernels.
The profiler lengthens operators that call others, so `wall - ops` is a little too low; the upper
bound is profiled wall - ops, which counts all of the profiler's own cost as ours.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import msgspec
import typer
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.support import machine, report
from benchmarks.support.kernel_times import timed_kernels
from benchmarks.support.models import MODELS, random_prompts, save_random
from benchmarks.support.pairs import Spread, alternate, turns
from benchmarks.support.plots import grouped_bars
from benchmarks.support.tandem_engine import ARENA_BYTES, BareCore, request_of
from serving.config import NodeConfig

SECONDS = (180, 30)
BATCHES = (8, 32)
PROMPT_TOKENS = 64
STEPS = 8
STEP = "step"
WARM_STEPS = 10
HEADERS = (
    "case",
    "step us",
    "outside of ops us",
    "share",
    "at most us",
    "ops us",
    "ops per step",
)


class Sample(msgspec.Struct, frozen=True):
    """The fastest of STEPS steps, in microseconds; no `ops` and `count` without the profiler."""

    wall: float
    ops: float = 0.0
    count: float = 0.0


class Row(msgspec.Struct, frozen=True):
    """One model at one batch size, microseconds per step."""

    case: str
    wall: Spread
    ops: Spread
    overhead: Spread
    share: Spread
    upper: Spread
    count: float


class Bench:
    """A bare core whose `batch` requests all decode and do not end while it is measured."""

    def __init__(self, core: BareCore, batch: int, tokens: int) -> None:
        self._core = core.core
        for number, prompt in enumerate(random_prompts(batch, PROMPT_TOKENS, seed=batch)):
            core.add(request_of(number, prompt, tokens))
        while core.scheduler.num_waiting:
            core.core.step()
        for _ in range(WARM_STEPS):
            core.core.step()

    def clock(self) -> Sample:
        """STEPS steps by the clock."""
        seconds = []
        for _ in range(STEPS):
            started = perf_counter()
            self._core.step()
            seconds.append(perf_counter() - started)
        return Sample(1e6 * min(seconds))

    def profiled(self) -> Sample:
        """STEPS steps under the profiler."""
        kernels: list[list[float]] = []
        with (
            timed_kernels() as seen,
            profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler,
        ):
            for _ in range(STEPS):
                with record_function(STEP):
                    self._core.step()
                kernels.append([call.us for call in seen])
                seen.clear()
        steps = [event for event in profiler.events() if event.name == STEP]
        samples = map(_sample, steps, kernels)
        return min(samples, key=lambda sample: sample.wall)


def _sample(step: Any, kernels: list[float]) -> Sample:
    """One profiled step, whose children are the top-level operators; and its kernels' times."""
    ops = [child.time_range.elapsed_us() for child in step.cpu_children] + kernels
    return Sample(step.time_range.elapsed_us(), sum(ops), len(ops))


def measure(case: str, bench: Bench, rounds: int, *, until: float, done: Callable[[], None]) -> Row:
    """Clocked and profiled steps in alternating rounds."""
    ways = {"clock": bench.clock, "profiled": bench.profiled}
    samples = alternate(ways, rounds, until=until, done=done)
    pairs = list(zip(samples["clock"], samples["profiled"], strict=True))
    overheads = [clock.wall - seen.ops for clock, seen in pairs]
    return Row(
        case,
        Spread.of([clock.wall for clock, _ in pairs]),
        Spread.of([seen.ops for _, seen in pairs]),
        Spread.of(overheads),
        Spread.of_ratio(overheads, [clock.wall for clock, _ in pairs]),
        Spread.of([seen.wall - seen.ops for _, seen in pairs]),
        pairs[0][1].count,
    )


def run(
    models: Sequence[str], rounds: int, found: report.Report, *, batches: Sequence[int]
) -> list[Row]:
    """Every model at every batch size."""
    rows: list[Row] = []
    total = len(models) * len(batches) * 2 * turns(rounds)
    left = len(models) * len(batches)
    with (
        tempfile.TemporaryDirectory() as folder,
        report.progress(found.console, total) as describe,
    ):
        for name in models:
            checkpoint = save_random(name, Path(folder))
            for batch in batches:
                case = f"{name}, batch {batch}"
                until, done = found.share(left - len(rows)), describe(case)
                rows.append(
                    _measure_batch(checkpoint, case, batch, rounds=rounds, until=until, done=done)
                )
    return rows


def _measure_batch(
    checkpoint: Path,
    case: str,
    batch: int,
    *,
    rounds: int,
    until: float,
    done: Callable[[], None],
) -> Row:
    tokens = 2 * STEPS * turns(rounds) + WARM_STEPS + PROMPT_TOKENS
    options = NodeConfig(
        max_num_seqs=batch, enable_prefix_caching=False, kv_cache_memory_bytes=ARENA_BYTES
    )
    with BareCore(checkpoint, options) as core:
        return measure(case, Bench(core, batch, tokens), rounds, until=until, done=done)


def cells(row: Row) -> list[str]:
    """One line of the table."""
    return [
        row.case,
        f"{row.wall.median:,.0f}",
        row.overhead.show(0),
        f"{row.share.median:.0%}",
        f"{row.upper.median:,.0f}",
        f"{row.ops.median:,.0f}",
        f"{row.count:,.0f}",
    ]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one warm-up.")] = 25,
    model: Annotated[list[str] | None, typer.Option(help="gdn or mamba2. [both]")] = None,
    cpu: Annotated[str, typer.Option(help="Core to run on, or `all`.")] = "0",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Decode step time outside of operators, in microseconds, at batch 8 and 32."""
    found = report.Report("decode_overhead", out, SECONDS, cpu=cpu, quick=quick)
    models, batches = model or list(MODELS), list(BATCHES)
    if quick:
        rounds, models, batches = 1, models[:1], batches[:1]
    rows = run(models, rounds, found, batches=batches)
    host = machine.describe(found.host)
    note = f"fastest of {STEPS} steps, median of at most {rounds} rounds; {host}"
    found.publish("Decode step", headers=HEADERS, rows=list(map(cells, rows)), note=note)
    series = {"operators": [r.ops for r in rows], "overhead": [r.overhead for r in rows]}
    grouped_bars(found.plot(), [row.case for row in rows], series, ylabel="us per step")
    found.save(rows)


if __name__ == "__main__":
    typer.run(main)
