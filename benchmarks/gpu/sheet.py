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

Verdict = Literal["right", "wrong", "failed", "met", "missed", ""]
BYTES = 588 << 20
"""The K/V and states that Qwen3.5-4B has after 16,384 tokens."""
SPANS = (1, 16, 64)


class Row(msgspec.Struct, frozen=True):
    """One case of a phase; a figure that is only told has no verdict.

    `bound` and `goal`: what the figure must reach, and what it should, of a row of the acceptance.
    """

    phase: str
    case: str
    figure: str
    verdict: Verdict = ""
    bound: str = ""
    goal: str = ""


@dataclass(slots=True, frozen=True)
class Setting:
    """Where a phase runs, with folders for checkpoints and results; `quick` is for a CPU's sake."""

    device: str
    models: Path
    out: Path
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

    def graph_seconds(self, work: Callable[[int], object], calls: int = 24) -> float:
        """The time of one `work` among `calls`, whose numbers it is given, in one CUDA graph.

        So nothing of it is the host's. Work that asks the device for something fails.
        """
        if not self.on_gpu:
            return self.seconds(lambda: work(0))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work(0)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(calls):
                work(number)
        return self.seconds(graph.replay) / calls

    def queued_seconds(self, work: Callable[[], object], calls: int = 8) -> float:
        """The time of one `work` among `calls` that are launched without waiting."""
        calls = 1 if self.quick else calls
        return self.seconds(lambda: [work() for _ in range(calls)], 7) / calls


@dataclass(slots=True, frozen=True)
class Ceilings:
    """Rates of a card that no kernel exceeds: bytes per second, and operations per second.

    `copy`: read and written bytes together; `product`: of two bfloat16 matrices.
    """

    copy: float
    read: float
    product: float

    @classmethod
    def measure(cls, setting: Setting) -> "Ceilings":
        """Takes half a second on a card."""
        nbytes, side = (16 << 20, 256) if setting.quick else (2 << 30, 8192)
        words = torch.ones(nbytes // 4, device=setting.device)
        target = torch.empty_like(words)
        copy = 2 * nbytes / setting.seconds(lambda: target.copy_(words))
        read = nbytes / setting.seconds(words.sum)
        left, right = (
            torch.randn(side, side, device=setting.device, dtype=torch.bfloat16) for _ in range(2)
        )
        return cls(copy, read, 2 * side**3 / setting.seconds(lambda: left @ right))


class Sheet:
    """The rows of one phase in a file, written anew with each of them."""

    def __init__(self, phase: str, file: Path) -> None:
        self._phase, self._file = phase, file
        self._rows: list[Row] = []

    def tell(self, case: str, figure: object, verdict: Verdict = "") -> None:
        """One more row, printed and written."""
        self._add(Row(self._phase, case, str(figure), verdict))

    def accept(
        self,
        case: str,
        value: float,
        unit: str,
        *,
        accept: float,
        goal: float | None = None,
        at_least: bool = False,
    ) -> None:
        """One row of the acceptance: at most `accept`, or `at_least` so much; so of `goal`."""
        sign = -1 if at_least else 1
        bounds = [
            "" if bound is None else f"{'≥' if at_least else '≤'} {bound:.4g}"
            for bound in (accept, goal)
        ]
        if goal is not None and sign * value <= sign * goal:
            bounds[1] += ", reached"
        # Not a number is no less than anything.
        verdict: Verdict = "met" if sign * value <= sign * accept else "missed"
        self._add(Row(self._phase, case, f"{value:.4g} {unit}".strip(), verdict, *bounds))

    def near(self, case: str, found: Tensor, truth: Tensor, *, limit: float) -> float:
        """The largest error of `found`, as a share of the largest value of `truth`; also told."""
        wide = truth.double()
        error = float((found.detach().cpu().double() - wide).abs().max() / wide.abs().max())
        self.tell(case, f"{error:.1e}", "right" if error <= limit else "wrong")
        return error

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        bounds = f"{row.bound} ({row.goal})" if row.goal else row.bound
        print(f"{self._phase:12} {row.case:58} {row.figure} {bounds} {row.verdict}", flush=True)
        self._file.write_bytes(msgspec.json.format(msgspec.json.encode(self._rows)))

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
