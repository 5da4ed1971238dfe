"""The output of every benchmark: its time limit, a progress bar, tables, and files in one folder.

`NAME.json` and its plots go to `--out`; `python -m benchmarks.support.report_page` makes a page.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from benchmarks.support import machine, pairs

Cells = Sequence[str]
# A description of what comes next; the result is called after each part of it.
Tell = Callable[[str], Callable[[], None]]
RESULTS = Path(__file__).parents[1] / "results"
Out = Annotated[Path, typer.Option(help="The folder for its JSON and plots.")]
Quick = Annotated[bool, typer.Option(help="Small and short: shows that it runs, measures little.")]
NO_TARGET = (
    "error: --target: this benchmark sets flags of its own servers or reads their clocks; "
    "benchmarks.serving, its replay and its conversation take targets"
)
GIT_S = 5.0
FILE_WIDTH = 10_000
# The last part must end in time for its table and its plot.
RESERVE_S = 5.0


def _refuse_target(url: str) -> str:
    if url:
        typer.echo(NO_TARGET, err=True)
        raise typer.Exit(2)
    return url


OwnServers = Annotated[
    str,
    typer.Option("--target", callback=_refuse_target, help="None: it starts servers of its own."),
]


class Table(msgspec.Struct, frozen=True):
    """One table as it was printed."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The file of one run: what every benchmark has, and its own `data`.

    `commit`: of the tree, with a + where files differ from it; None outside a checkout.
    """

    name: str
    date: str
    commit: str | None
    seconds: float
    quick: bool
    machine: machine.Machine
    tables: list[Table]
    plots: list[str]
    data: Any


class Report:
    """One run of one benchmark. `seconds`: how long it may take, whole and in its quick form."""

    def __init__(
        self,
        name: str,
        out: Path,
        seconds: tuple[float, float],
        *,
        cpu: str,
        quick: bool,
        threads: int = 1,
    ) -> None:
        self.console = console()
        self.host = machine.prepare(cpu, threads)
        self._name, self._out, self._quick = name, out, quick
        self._tables: list[Table] = []
        self._plots: list[str] = []
        self._began, limit = monotonic(), seconds[quick]
        self.ends_at = self._began + limit
        end = datetime.now() + timedelta(seconds=limit)
        most = f"{limit:.0f} s" if limit < 120 else f"{limit / 60:.0f} minutes"
        self.console.print(f"{name}: at most {most}, ends by {end:%H:%M:%S}", style="dim")
        out.mkdir(parents=True, exist_ok=True)

    def share(self, left: int) -> float:
        """When (monotonic) the next of `left` equal parts should end, to keep to the time."""
        return pairs.share(self.ends_at - RESERVE_S, left)

    def publish(self, title: str, *, headers: Cells, rows: Sequence[Cells], note: str) -> None:
        """The table for people, and the same rows as Markdown with today's date."""
        publish(self.console, title, headers=headers, rows=rows, note=note)
        self._tables.append(Table(title, tuple(headers), tuple(map(tuple, rows)), note))

    def plot(self, name: str = "") -> Path:
        """The file for a plot, which must be drawn before `save`."""
        file = f"{name or self._name}.png"
        self._plots.append(file)
        return self._out / file

    def save(self, data: Any) -> None:
        """Writes `NAME.json`; the end of the run."""
        results = Results(
            name=self._name,
            date=datetime.now().isoformat(timespec="seconds"),
            commit=_commit(),
            seconds=monotonic() - self._began,
            quick=self._quick,
            machine=self.host,
            tables=self._tables,
            plots=self._plots,
            data=data,
        )
        file = self._out / f"{self._name}.json"
        file.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
        self.console.print(f"{self._name}: {results.seconds:.0f} s; {file}", style="dim")


def console() -> Console:
    """Of standard output; in a file or a pipe no line is cut."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Tell]:
    """A bar over `total` runs; call the result with a description to get its `done`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def describe(description: str) -> Callable[[], None]:
            bar.update(task, description=description)
            return lambda: bar.advance(task)

        yield describe


def table(title: str, headers: Cells, rows: Sequence[Cells]) -> RichTable:
    """The first column left, numbers right."""
    made = RichTable(title=title, title_justify="left")
    for place, header in enumerate(headers):
        made.add_column(header, justify="right" if place else "left")
    for row in rows:
        made.add_row(*row)
    return made


def publish(
    console: Console, title: str, *, headers: Cells, rows: Sequence[Cells], note: str
) -> None:
    """The table for people, and the same rows as Markdown with today's date."""
    console.print(table(title, headers, rows))
    console.print(note, style="dim", highlight=False)
    today = datetime.now().date().isoformat()
    lines = [f"| {today} | {' | '.join(row)} |" for row in rows]
    console.print("\nRows for benchmarks/pages/:", style="dim")
    console.print("\n".join(lines), style="dim", highlight=False, soft_wrap=True)


def write_json(file: Path | None, content: Any) -> None:
    """`content` as JSON in `file`, if one is given."""
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content)))


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
