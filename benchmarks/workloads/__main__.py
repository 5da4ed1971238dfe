"""`python -m benchmarks.workloads NAME`: a generated request stream, beside what it resembles.

Prints the statistics of the stream and, where there are any, those of the published trace that it
is made to resemble. `--out FILE` writes the stream: Mooncake's JSON lines with our own keys, which
`benchmarks.serving`, its `replay`, and `routing`, `offload` and `policies` of the cache read.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.support import report
from benchmarks.workloads.catalogue import WORKLOADS
from benchmarks.workloads.figures import figures
from benchmarks.workloads.traces import write_trace

HEADERS = ("statistic", "generated", "published", "generated / published")
NAMES = "; ".join(f"{name} {one.title}" for name, one in WORKLOADS.items())


def cells(name: str, value: float, published: float | None) -> list[str]:
    """One line of the table."""
    if published is None:
        return [name, _show(value), "", ""]
    return [name, _show(value), _show(published), f"{value / published:.2f}"]


def main(
    name: Annotated[str, typer.Argument(help=NAMES)],
    seed: Annotated[int, typer.Option(help="Equal seeds, equal streams.")] = 0,
    scale: Annotated[float, typer.Option(min=0.001, help="1 is the size of the original.")] = 1.0,
    *,
    out: Annotated[Path | None, typer.Option(help="Write the stream here.")] = None,
) -> None:
    """The statistics of a generated request stream beside the published ones."""
    if name not in WORKLOADS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    records = workload.make(scale, seed)
    published = workload.published
    rows = [cells(key, value, published.get(key)) for key, value in figures(records).items()]
    console = report.console()
    console.print(report.table(f"{name}, {workload.title}", HEADERS, rows))
    console.print(f"seed {seed}, scale {scale:g}; published: {workload.source}", style="dim")
    if out is not None:
        write_trace(out, records)
        console.print(f"{len(records):,} requests in {out}")


def _show(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    typer.run(main)
