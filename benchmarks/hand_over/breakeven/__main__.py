"""`python -m benchmarks.hand_over.breakeven`: from which prompt length on does disaggregation pay?

Prefill: from asking P to its answer. Path: from asking D to the first token of its own, without the
step that computes it: what D waits for a prompt that P has, instead of computing it. PD pays where
the path is shorter than the prefill, as D then decodes for others meanwhile. The threshold counts
tokens that D lacks: with a cached prefix on D both lines start after it.

Measured: two real nodes on this machine over shared memory, a random model with 32 KiB of K/V per
token. On paper: published models, links of given speeds, a path of `--path-ms` beside its bytes and
a node that computes `--tflops`.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks.hand_over.breakeven.lines import Lines, measure
from benchmarks.hand_over.breakeven.paper import ACTIVE, Model
from benchmarks.support import machine, report
from benchmarks.support.plots import curves

SECONDS = (240, 40)
LENGTHS, QUICK_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), (16, 128, 512)
GBITS = (10.0, 25.0, 100.0, 400.0)
HEADERS = ("prompt", "prefill ms", "path ms", "prefill / path", "MB moved")
LINE_HEADERS = (
    "lines",
    "prefill us per token",
    "path us per token",
    "path, fixed ms",
    "PD pays from",
)


def point_cells(lines: Lines) -> list[list[str]]:
    """The measured table."""
    return [
        [
            f"{point.tokens:,} tokens",
            point.prefill.show(1),
            point.path.show(1),
            point.ratio.show(),
            f"{point.moved_bytes / 1e6:.2f}",
        ]
        for point in lines.points
    ]


def line_cells(lines: Lines) -> list[str]:
    """The line of the two lines."""
    tokens = lines.breakeven()
    pays = "no length" if tokens is None else f"{tokens:,.0f} tokens"
    if tokens == 0:
        pays = f"{lines.points[0].tokens} tokens or less"
    micros = (lines.prefill_us_per_token, lines.path_us_per_token)
    return ["this machine", *(f"{us:.1f}" for us in micros), f"{lines.path_fixed_ms:.2f}", pays]


def paper(gbits: Sequence[float], *, path_ms: float, tflops: float) -> dict[str, list[int | None]]:
    """Break-even tokens of every published model at every speed."""
    found: dict[str, list[int | None]] = {}
    for name in ACTIVE:
        model = Model.read(name)
        found[name] = [
            model.breakeven(1e9 / 8 * speed, fixed_s=path_ms / 1e3, flops=1e12 * tflops)
            for speed in gbits
        ]
    return found


def paper_cells(name: str, tokens: Sequence[int | None]) -> list[str]:
    """A line of the table on paper."""
    model = Model.read(name)
    shown = ["never" if one is None else f"{one:,}" for one in tokens]
    sizes = (f"{model.token_bytes / 1024:.0f}", f"{model.state_bytes / 1e6:.1f}")
    return [name, *sizes, *shown]


def draw(
    found: report.Report,
    lines: Lines,
    by_model: dict[str, list[int | None]],
    *,
    gbits: Sequence[float],
) -> None:
    """Milliseconds over tokens, and the break-even over link speeds."""
    by_line = {
        "prefill": [(float(point.tokens), point.prefill.median) for point in lines.points],
        "path": [(float(point.tokens), point.path.median) for point in lines.points],
    }
    panel = {"measured": by_line}
    curves(found.plot(), panel, xlabel="tokens of the prompt", ylabel="ms", log_y=True)
    by_speed = {
        name: [(x, float(y)) for x, y in zip(gbits, tokens, strict=True) if y is not None]
        for name, tokens in by_model.items()
    }
    file, panel = found.plot("breakeven_paper"), {"on paper": by_speed}
    curves(file, panel, xlabel="Gbit/s", ylabel="break-even, tokens", log_y=True)


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one.")] = 7,
    gbit: Annotated[list[float] | None, typer.Option(min=0.1, help="[10, 25, 100, 400]")] = None,
    path_ms: Annotated[float, typer.Option(min=0, help="On paper, beside the bytes.")] = 20.0,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="On paper: 45 % of an H200's bfloat16.")
    ] = 445.0,
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """The prompt length from which PD pays: measured here, and on paper for published models."""
    found = report.Report("breakeven", out, SECONDS, cpu="all", quick=quick)
    gbits = gbit or list(GBITS)
    rounds, lengths = (1, QUICK_LENGTHS) if quick else (rounds, LENGTHS)
    lines = measure(found, lengths, rounds)
    taken = lines.points[0].rounds
    note = f"medians (lowest-highest) of {taken} rounds; {machine.describe(found.host)}"
    found.publish("Measured", headers=HEADERS, rows=point_cells(lines), note=note)
    found.publish("Lines", headers=LINE_HEADERS, rows=[line_cells(lines)], note=note)
    by_model = paper(gbits, path_ms=path_ms, tflops=tflops)
    headers = (
        "tokens from which PD pays",
        "KiB per token",
        "state, MB",
        *(f"{speed:g} Gbit/s" for speed in gbits),
    )
    rows = [paper_cells(name, tokens) for name, tokens in by_model.items()]
    note = f"{path_ms:g} ms beside the bytes, {tflops:g} TFLOP/s; bfloat16, float32 states"
    found.publish("On paper", headers=headers, rows=rows, note=note)
    draw(found, lines, by_model, gbits=gbits)
    found.save({"lines": lines, "paper": by_model, "gbits": gbits})


if __name__ == "__main__":
    typer.run(main)
