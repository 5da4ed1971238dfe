"""`python -m benchmarks.gpu`: first what the card can do, then what the engine does.

Every phase is a process with a time limit of its own, so that a hang costs one phase. `PHASE.log`
and `phase-PHASE.json` of each are in the folder, and a table of all rows ends the run. Without a
GPU the phases that compare run on the CPU, which shows that they compare. What is right is judged
against the naive operators, a node on the CPU, or one node; speeds are only told.
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
from benchmarks.gpu.tuning import CONFIGS
from benchmarks.support import report

# Seconds that each may take.
LIMITS = MappingProxyType(
    {
        "card": 60,
        "ipc": 45,
        "operators": 60,
        "parity": 120,
        "transports": 120,
        "pairs": 200,
        "speed": 170,
        "kernels": 90,
    }
)
EXACT = frozenset({"operators", "parity"})
NEED_GPU = frozenset({"ipc", "speed", "kernels"})


def environment(name: str, device: str, out: Path) -> dict[str, str]:
    """Variables of Triton and fla, which both read when they are imported."""
    if device == "cpu":
        return {"TRITON_INTERPRET": "1"}
    # What a phase has tuned the next one takes, in every process alike.
    variables = {"FLA_CACHE_MODE": "strict", "FLA_CONFIG_DIR": str((out / CONFIGS).resolve())}
    if name in EXACT:
        # Else fla's products of float32 have the ten bits of TF32.
        variables["TRITON_F32_DEFAULT"] = "ieee"
    return variables


def run_phase(name: str, device: str, *, models: Path, out: Path, quick: bool) -> str:
    """One phase to its end or its limit; how it ended."""
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
            return f"status {process.wait(LIMITS[name])}"
        except subprocess.TimeoutExpired:
            return f"not done after {LIMITS[name]} s"
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
    for name in phase or LIMITS:
        if device == "cpu" and name in NEED_GPU:
            continue
        started = monotonic()
        ended = run_phase(name, device, models=models, out=out, quick=quick)
        console.print(f"{name}: {ended}, {monotonic() - started:.0f} s", highlight=False)
    rows = [(row.phase, row.case, row.figure, row.verdict) for row in read_rows(out)]
    console.print(report.table("GPU", ("phase", "case", "figure", "verdict"), rows))


if __name__ == "__main__":
    typer.run(main)
