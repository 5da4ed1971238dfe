"""`python -m benchmarks.cache.offload`: what the OffloadConnector's tiers cost and save.

ttft     the first token of a prompt that was asked before: computed, or found in each tier
copies   bytes per second of each tier, beside a plain copy and a plain read
steps    a decode step beside a tier: idle, and while it loads as fast as it can
scan     the start of a disk tier with many files
replay   hits of G1, or of a trace in Mooncake's format, with and without tiers; ids only
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cache.offload import copies, replay, scan, steps, ttft
from benchmarks.support import machine, report
from benchmarks.support.pairs import turns
from benchmarks.support.plots import curves
from benchmarks.workloads.traces import TraceError

Done = Callable[[], None]
Describe = Callable[[str], Done]
SECONDS = (900, 45)
COPY_BYTES, QUICK_COPY_BYTES = 512 << 20, 64 << 20
ITEM_BYTES = (64 << 10, 256 << 10, 2 << 20)
QUICK_ITEM_BYTES = (256 << 10,)
PROMPT, QUICK_PROMPT = 8192, 1024
FILES, QUICK_FILES = 20_000, 1_000
QUICK_PART = 0.02
# Of the time, at least, for each section that comes later.
SECTION_S = 90.0


class Section(StrEnum):
    """One question."""

    TTFT = "ttft"
    COPIES = "copies"
    STEPS = "steps"
    SCAN = "scan"
    REPLAY = "replay"


class Bench:
    """All sections; each publishes its table as soon as it has it."""

    def __init__(self, found: report.Report, rounds: int, *, quick: bool):
        self.data: dict[str, object] = {}
        self._found = found
        self._console = found.console
        self._note = f"at most {rounds} rounds; {machine.describe(found.host)}"
        self._rounds = rounds
        self._quick = quick

    def _until(self, section: Section) -> float:
        """When (monotonic) it should end: what comes after it has its time, too."""
        left = len(list(Section)) - 1 - list(Section).index(section)
        return self._found.ends_at - left * (0.0 if self._quick else SECTION_S)

    def ttft(self) -> None:
        """The repeated prompt."""
        length = QUICK_PROMPT if self._quick else PROMPT
        with report.progress(self._console, 4 * (1 + self._rounds)) as describe:
            seconds = ttft.measure(
                length,
                self._rounds,
                describe(f"{length:,} tokens"),
                until=self._until(Section.TTFT),
            )
        self._publish(Section.TTFT, f"{length:,} tokens again", [ttft.HEADERS, *ttft.rows(seconds)])

    def copies(self) -> None:
        """Arena and tiers."""
        nbytes = QUICK_COPY_BYTES if self._quick else COPY_BYTES
        sizes = list(QUICK_ITEM_BYTES if self._quick else ITEM_BYTES)
        with report.progress(self._console, 9 * len(sizes) * (1 + self._rounds)) as describe:
            rows = copies.measure(
                sizes, nbytes, self._rounds, until=self._until(Section.COPIES), done=describe
            )
        self._publish(Section.COPIES, f"{nbytes >> 20} MiB at once", [copies.HEADERS, *rows])

    def steps(self) -> None:
        """Decode beside a tier."""
        with report.progress(self._console, 6 * turns(self._rounds, steps.WARMUPS)) as describe:
            rows = steps.measure(self._rounds, describe, until=self._until(Section.STEPS))
        self._publish(Section.STEPS, "Decode step", [steps.HEADERS, *rows])

    def scan(self) -> None:
        """A start with many files."""
        with report.progress(self._console, 2 * (1 + self._rounds)) as describe:
            files = QUICK_FILES if self._quick else FILES
            rows = scan.measure(files, self._rounds, describe, until=self._until(Section.SCAN))
        self._publish(Section.SCAN, "Start of a disk tier", [scan.HEADERS, *rows])

    def replay(self, trace: Path | None) -> None:
        """Hits by size of the arena."""
        streams = replay.traces(trace, QUICK_PART if self._quick else 1.0)
        total = len(streams) * len(replay.SHARES) * len(replay.TIERS)
        with report.progress(self._console, total) as describe:
            rows = replay.measure(streams, describe)
        lines = [replay.HEADERS, *(row.cells() for row in rows)]
        self._publish(Section.REPLAY, "Hits with and without tiers", lines)
        panels = replay.panels(rows)
        curves(self._found.plot(), panels, xlabel="arena, GB", ylabel="hits, %")

    def _publish(self, section: Section, title: str, lines: list[report.Cells]) -> None:
        headers, *rows = lines
        self._found.publish(title, headers=headers, rows=rows, note=self._note)
        self.data[section] = [dict(zip(headers, row, strict=True)) for row in rows]


def main(
    *,
    section: Annotated[list[Section] | None, typer.Option(help="Only these.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    trace: Annotated[Path | None, typer.Option(help="A Mooncake JSON-lines file.")] = None,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Time to first token, bytes per second, decode steps and hits of host and disk tiers."""
    found = report.Report("offload", out, SECONDS, cpu="all", quick=quick)
    bench = Bench(found, 1 if quick else rounds, quick=quick)
    chosen = section or list(Section)
    for name, measure in (
        (Section.TTFT, bench.ttft),
        (Section.COPIES, bench.copies),
        (Section.STEPS, bench.steps),
        (Section.SCAN, bench.scan),
    ):
        if name in chosen:
            measure()
    if Section.REPLAY in chosen:
        try:
            bench.replay(trace)
        except (TraceError, OSError) as error:
            raise typer.BadParameter(str(error)) from error
    found.save(bench.data)


if __name__ == "__main__":
    typer.run(main)
