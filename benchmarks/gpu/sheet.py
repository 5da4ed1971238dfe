"""Findings of a phase, written down at once: a phase that hangs keeps all it has told."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import msgspec
import torch
from torch import Tensor

Verdict = Literal["right", "wrong", "failed", ""]
BYTES = 588 << 20
"""The K/V and states that Qwen3.5-4B has after 16,384 tokens."""
SPANS = (1, 16, 64)


class Row(msgspec.Struct, frozen=True):
    """One case of a phase; a figure that is only told has no verdict."""

    phase: str
    case: str
    figure: str
    verdict: Verdict = ""


@dataclass(slots=True, frozen=True)
class Setting:
    """Where a phase runs: `models` is a folder for checkpoints; `quick` is for a CPU's sake."""

    device: str
    models: Path
    quick: bool

    @property
    def on_gpu(self) -> bool:
        """Whether there is a card to be measured."""
        return self.device != "cpu"

    def synchronize(self) -> None:
        """Return when the device has done all that was asked of it."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], rounds: int = 20) -> float:
        """The median time of `work`, the device's own work included."""
        for _ in range(3):
            work()
        taken = []
        for _ in range(3 if self.quick else rounds):
            self.synchronize()
            started = perf_counter()
            work()
            self.synchronize()
            taken.append(perf_counter() - started)
        return sorted(taken)[len(taken) // 2]


class Sheet:
    """The rows of one phase in a file, written anew with each of them."""

    def __init__(self, phase: str, file: Path) -> None:
        self._phase, self._file = phase, file
        self._rows: list[Row] = []

    def tell(self, case: str, figure: object, verdict: Verdict = "") -> None:
        """One more row, printed and written."""
        self._rows.append(Row(self._phase, case, str(figure), verdict))
        print(f"{self._phase:12} {case:58} {figure} {verdict}", flush=True)
        self._file.write_bytes(msgspec.json.format(msgspec.json.encode(self._rows)))

    def near(self, case: str, found: Tensor, truth: Tensor, *, limit: float) -> None:
        """The largest error of `found`, as a share of the largest value of `truth`."""
        wide = truth.double()
        error = float((found.detach().cpu().double() - wide).abs().max() / wide.abs().max())
        self.tell(case, f"{error:.1e}", "right" if error <= limit else "wrong")

    @contextmanager
    def attempt(self, case: str) -> Iterator[None]:
        """An error inside is a row, and does not end the phase."""
        try:
            yield
        # Broad on purpose: on a new device anything may fail, and the other cases still tell.
        except Exception as error:
            traceback.print_exc()
            self.tell(case, f"{type(error).__name__}: {error}"[:300], "failed")


def read_rows(folder: Path) -> list[Row]:
    """All rows of a run, phase by phase."""
    files = sorted(folder.glob("phase-*.json"), key=lambda file: file.stat().st_mtime)
    return [row for file in files for row in msgspec.json.decode(file.read_bytes(), type=list[Row])]


def gb_per_s(nbytes: int, seconds: float) -> str:
    """A rate for a row."""
    return f"{nbytes / seconds / 1e9:,.1f} GB/s ({seconds * 1e3:.2f} ms)"
