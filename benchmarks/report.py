"""The output of every benchmark: a progress bar, tables, JSON, and rows for pages/."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Cells = Sequence[str]


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], Callable[[], None]]]:
    """A bar over `total` runs; call the result with a description to get its `done`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def describe(description: str) -> Callable[[], None]:
            bar.update(task, description=description)
            return lambda: bar.advance(task)

        yield describe


def table(title: str, headers: Cells, rows: Sequence[Cells]) -> Table:
    """The first column left, numbers right."""
    made = Table(title=title, title_justify="left")
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
    today = date.today().isoformat()
    lines = [f"| {today} | {' | '.join(row)} |" for row in rows]
    console.print("\nRows for benchmarks/pages/:", style="dim")
    console.print("\n".join(lines), style="dim", highlight=False, soft_wrap=True)


def write_json(file: Path | None, content: Any) -> None:
    """`content` as JSON in `file`, if one is given."""
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
