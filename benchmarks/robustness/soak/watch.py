"""Resident memory, descriptors and threads of all servers over the time of a soak."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import msgspec
import psutil

from benchmarks.robustness.soak.cluster import ARENA_BYTES, Member

SLACK_DESCRIPTORS = 16
SLACK_THREADS = 24
SLACK_BYTES = 150 << 20
SLACK_SHARED_BYTES = 3 * ARENA_BYTES  # before the soak it may have met none of its peers yet
MEGABYTE = 2**20


class Holdings(msgspec.Struct, frozen=True):
    """Resources of one server at one moment; its children's memory counts as its own.

    `shared` bytes are arenas, its own and those of peers that it has mapped.
    """

    private: int
    shared: int
    descriptors: int
    threads: int

    def excess(self, before: "Holdings") -> str:
        """Resources held beyond `before` and some slack, in words; empty when all came back."""
        found = {
            "MB": (self.private - before.private - SLACK_BYTES) // MEGABYTE,
            "MB shared": (self.shared - before.shared - SLACK_SHARED_BYTES) // MEGABYTE,
            "descriptors": self.descriptors - before.descriptors - SLACK_DESCRIPTORS,
            "threads": self.threads - before.threads - SLACK_THREADS,
        }
        return ", ".join(f"{number:+} {name}" for name, number in found.items() if number > 0)


@dataclass(slots=True)
class Watch:
    """Samples by member: seconds since the start, and what it held then."""

    samples: dict[str, list[tuple[float, Holdings]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def take(self, seconds: float, members: list[Member]) -> None:
        """One sample of each member that is there."""
        for member in members:
            held = holdings(member)
            if held is not None:
                self.samples[member.name].append((seconds, held))

    def draw(self, file: Path) -> None:
        """Three panels over minutes, a line per server."""
        matplotlib.use("Agg")
        from matplotlib import pyplot  # after the backend is chosen

        titles = ("resident memory, MB", "descriptors", "threads")
        figure, grid = pyplot.subplots(len(titles), 1, figsize=(8, 7), sharex=True)
        for name, samples in self.samples.items():
            minutes = [seconds / 60 for seconds, _ in samples]
            rows = [
                ((held.private + held.shared) / MEGABYTE, held.descriptors, held.threads)
                for _, held in samples
            ]
            for axes, values in zip(grid, zip(*rows, strict=True), strict=True):
                axes.plot(minutes, values, linewidth=0.8, label=name)
        for axes, title in zip(grid, titles, strict=True):
            axes.set_title(title, fontsize=9)
        grid[-1].set_xlabel("minutes")
        grid[0].legend(fontsize=7, ncols=5)
        figure.tight_layout()
        figure.savefig(file)
        pyplot.close(figure)


def holdings(member: Member) -> Holdings | None:
    """Resources of a member now; None if it has just ended."""
    try:
        process = member.process
        memory = [each.memory_info() for each in (process, *process.children(recursive=True))]
        return Holdings(
            sum(each.rss - each.shared for each in memory),
            sum(each.shared for each in memory),
            process.num_fds(),
            process.num_threads(),
        )
    except psutil.Error:
        return None
