"""`python -m benchmarks.gpu.phase NAME DEVICE MODELS OUT`: one phase in this process."""

import importlib
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu.sheet import Setting, Sheet
from serving.process import configure_logging


def main(
    name: str,
    device: str,
    models: Path,
    *,
    out: Annotated[Path, typer.Argument()],
    quick: Annotated[bool, typer.Option()] = False,
) -> None:
    """Runs the module NAME of this folder."""
    configure_logging("warning")
    if device == "cpu":
        torch.set_num_threads(1)
    phase = importlib.import_module(f"benchmarks.gpu.{name}")
    sheet = Sheet(name, out / f"phase-{name}.json")
    with sheet.attempt("the phase itself"):
        phase.run(sheet, Setting(device, models, quick))


if __name__ == "__main__":
    typer.run(main)
