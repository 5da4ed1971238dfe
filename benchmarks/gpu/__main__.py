"""`python -m benchmarks.gpu`: first what the card can do, then what the engine does.

Every phase is a process with a time limit of its own, so that a hang costs one phase. `PHASE.log`
and `phase-PHASE.json` of each are in the folder, fla's tuned configurations in `fla`, and two
tables end the run: all rows, and those that were to reach a bound. Without a GPU the phases that
compare run on the CPU, operators in Triton's interpreter too, which shows that they compare. What
is right is judged against the naive operators, a node on the CPU, or one node.

A bare machine: `benchmarks/gpu/wheels.py`.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.gpu.sheet import read_rows
from benchmarks.gpu.tuning import CONFIGS, UNTUNED, UNTUNED_CONFIGS
from benchmarks.support import report

# Seconds that each may take, the most wanted first.
LIMITS = MappingProxyType(
    {
        "card": 40,
        "operators": 100,
        "kernels": 120,
        "speed": 180,
        "parity": 110,
        "transports": 120,
        "pairs": 200,
        "ipc": 45,
    }
)
LEAST = 10.0
"""Seconds below which no phase begins."""
NEED_GPU = frozenset({"ipc", "speed", "kernels"})


def environment(name: str, device: str, out: Path) -> dict[str, str]:
    """Variables of Triton and fla, which both read when they are imported."""
    if device == "cpu":
        return {"TRITON_INTERPRET": "1"}
    # What a phase has chosen the next one takes, in every process alike.
    folder = UNTUNED_CONFIGS if name in UNTUNED else CONFIGS
    variables = {"FLA_CACHE_MODE": "strict", "FLA_CONFIG_DIR": str((out / folder).resolve())}
    if name in UNTUNED:
        # Else fla's products of float32 have the ten bits of TF32; and what was not measured is not
        # remembered by Triton.
        variables |= {"TRITON_F32_DEFAULT": "ieee", "FLA_CACHE_RESULTS": "0"}
    return variables


def run_phase(name: str, device: str, *, models: Path, out: Path, quick: bool, limit: float) -> str:
    """One phase to its end or its limit, in seconds; how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.phase", name, device, str(models), str(out)]
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *(["--quick"] if quick else [])],
            env={**os.environ, **environment(name, device, out)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return f"status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            return f"not done after {limit:.0f} s"
        finally:
            # The nodes of a phase are in its session, and may outlive it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(
    *,
    out: report.Out = report.RESULTS / "gpu",
    phase: Annotated[list[str] | None, typer.Option(help="Only these; repeat for several.")] = None,
    models: Annotated[Path, typer.Option(help="A folder for checkpoints.")] = Path("/dev/shm/gpu"),
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    budget: Annotated[float, typer.Option(help="Seconds for all; what is left out is told.")] = 900,
    quick: report.Quick = False,
) -> None:
    """All phases, or those asked for, and a table of their rows."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(width=150)
    if device == "cpu":
        console.print("no GPU: the phases that compare run on the CPU, and no speed means much")
    out.mkdir(parents=True, exist_ok=True)
    models.mkdir(parents=True, exist_ok=True)
    end = monotonic() + budget
    for name in phase or LIMITS:
        if device == "cpu" and name in NEED_GPU:
            continue
        started = monotonic()
        limit = min(LIMITS[name], end - started)
        ended = "left out: the budget is spent"
        if limit >= LEAST:
            ended = run_phase(name, device, models=models, out=out, quick=quick, limit=limit)
        console.print(f"{name}: {ended}, {monotonic() - started:.0f} s", highlight=False)
    found = read_rows(out)
    rows = [(row.phase, row.case, row.figure, row.verdict) for row in found if not row.bound]
    console.print(report.table("GPU", ("phase", "case", "figure", "verdict"), rows))
    accepted = [
        (row.phase, row.case, row.figure, row.bound, row.goal, row.verdict)
        for row in found
        if row.bound
    ]
    headers = "phase", "case", "figure", "bound", "goal", "verdict"
    if accepted:
        console.print(report.table("What was to be reached", headers, accepted))


if __name__ == "__main__":
    typer.run(main)
