"""`python -m benchmarks.gpu.phase NAME DEVICE MODELS OUT`: one phase in this process."""

import importlib
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu.sheet import Setting, Sheet
from benchmarks.gpu.tuning import CONFIGS, TUNED, UNTUNED, Stopwatch, save, take_the_first
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
    sheet = Sheet(name, out / f"phase-{name}.json")
    watch = None
    with sheet.attempt("the phase itself"):
        phase = importlib.import_module(f"benchmarks.gpu.{name}")
        if device != "cpu" and name in TUNED:
            watch = Stopwatch()
        elif device != "cpu" and name in UNTUNED:
            take_the_first()
        phase.run(sheet, Setting(device, models, out, quick))
    if watch is not None:
        with sheet.attempt("tuning"):
            kept = save(out / CONFIGS)
            figure = f"{watch.seconds:.1f} s for {watch.kernels} configurations, {kept} kept"
            sheet.tell("tuning of fla's kernels", figure)


if __name__ == "__main__":
    typer.run(main)
