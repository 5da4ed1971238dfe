"""Small charts of benchmark results; the only file here that knows matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import msgspec

from benchmarks.support.pairs import Spread

GROUP_WIDTH = 0.8
MAX_TICKS = 10
TIMELINE_COLORS = ("0.8", "tab:orange", "tab:blue", "tab:red")


def grouped_bars(
    file: Path,
    labels: Sequence[str],
    series: Mapping[str, Sequence[Spread]],
    *,
    ylabel: str,
    marks: Sequence[float] | None = None,
) -> None:
    """Bars by label, one per series, with min-max whiskers; `marks` are targets, one per label."""
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the backend is chosen

    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.1 * len(labels)), 3.4))
    width = GROUP_WIDTH / len(series)
    for place, (name, spreads) in enumerate(series.items()):
        centers = [x - GROUP_WIDTH / 2 + (place + 0.5) * width for x in range(len(labels))]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.low for spread in spreads]
        above = [spread.high - spread.median for spread in spreads]
        axes.bar(centers, medians, width * 0.95, yerr=[below, above], capsize=2, label=name)
    for place, mark in enumerate(marks or ()):
        label = "_" if place else "target"
        axes.hlines(mark, place - 0.45, place + 0.45, "black", "--", label=label)
    axes.set_xticks(range(len(labels)), [label.replace(", ", "\n") for label in labels], fontsize=7)
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def curves(
    file: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    xlabel: str,
    ylabel: str,
    log_x: bool = True,
    log_y: bool = False,
) -> None:
    """One panel per title, side by side, of (x, y) lines by name."""
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the backend is chosen

    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.4), sharey=True, squeeze=False
    )
    for axes, (title, lines) in zip(grid[0], panels.items(), strict=True):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set_xscale("log" if log_x else "linear")
        # A short logarithmic axis would write a label at every minor tick, one over the other.
        ticks = sorted({x for points in lines.values() for x, _ in points})
        ticks = ticks[:: -(-len(ticks) // MAX_TICKS)]
        axes.set_xticks(ticks, [f"{x:.4g}" for x in ticks], rotation=45, fontsize=7)
        axes.tick_params(axis="x", which="minor", labelbottom=False)
        axes.set_yscale("log" if log_y else "linear")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(xlabel)
    grid[0][0].set_ylabel(ylabel)
    grid[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


class Bar(msgspec.Struct, frozen=True):
    """One request in seconds; one that failed has no first token."""

    due: float
    sent: float
    first: float | None
    ended: float


def timeline(file: Path, panels: Mapping[str, Sequence[Bar]]) -> None:
    """One panel per title, one below the other, and in each a line per request."""
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the backend is chosen

    heights = [min(6.0, 1.2 + 0.06 * len(bars)) for bars in panels.values()]
    figure, grid = pyplot.subplots(
        len(panels),
        1,
        figsize=(8.0, sum(heights)),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    )
    for axes, (title, bars) in zip(grid[:, 0], panels.items(), strict=True):
        parts = {
            "waiting": [(bar.due, bar.sent) for bar in bars],
            "prefill": [(bar.sent, bar.sent if bar.first is None else bar.first) for bar in bars],
            "decode": [(bar.ended if bar.first is None else bar.first, bar.ended) for bar in bars],
            "failed": [(bar.sent if bar.first is None else bar.ended, bar.ended) for bar in bars],
        }
        for (name, spans), color in zip(parts.items(), TIMELINE_COLORS, strict=True):
            widths = [end - begin for begin, end in spans]
            begins = [begin for begin, _ in spans]
            axes.barh(range(len(spans)), widths, 0.8, left=begins, color=color, label=name)
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("request")
        axes.invert_yaxis()
    grid[-1][0].set_xlabel("seconds since the first was due")
    grid[0][0].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
