"""`python -m benchmarks.support.report_page`: one HTML file of all results in a folder, on its own.

Tables and machines as their benchmarks wrote them, plots inside the file; the oldest run first. It
loads nothing from elsewhere and follows the reader's choice of light or dark.
"""

import base64
import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.support import machine
from benchmarks.support.report import RESULTS, Results, Table

PAGE = "report.html"
STYLE = """
:root { color-scheme: light dark; --back: #fcfcfb; --text: #1d1f21; --soft: #62676d;
  --line: #dfe1e3; --band: #f1f2f3; --link: #1a5fb4; }
@media (prefers-color-scheme: dark) { :root { --back: #16181a; --text: #e4e6e8; --soft: #9aa0a6;
  --line: #33373b; --band: #1f2225; --link: #8ab4f8; } }
body { margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 76rem; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .3rem; font-size: 1.9rem; } h2 { margin: 0; font-size: 1.3rem; }
h3 { margin: 1.4rem 0 .4rem; font-size: 1rem; }
p, nav { margin: .2rem 0; color: var(--soft); } a { color: var(--link); text-decoration: none; }
nav { margin: 1.2rem 0 2rem; line-height: 2; }
nav a { margin-right: .5rem; padding: .15rem .6rem; border: 1px solid var(--line);
  border-radius: 1rem; white-space: nowrap; }
section { margin-top: 2.5rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: .3rem; text-align: left; }
tbody tr:hover { background: var(--band); } .note { font-size: .85rem; }
.quick { padding: 0 .5rem; border-radius: .3rem; background: var(--band); font-size: .8rem; }
img { max-width: 100%; margin-top: 1rem; border-radius: .4rem; background: #fff; }
"""


def page(results: Sequence[Results], plots: Path) -> str:
    """The whole file; `plots`: the folder of the plots, of which those that are gone are left out.

    Names and texts are escaped: what a benchmark wrote cannot become markup.
    """
    links = (f'<a href="#{_text(one.name)}">{_text(one.name)}</a>' for one in results)
    body = "\n".join(_section(one, plots) for one in results)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tandem benchmarks</title><style>{STYLE}</style></head>\n<body>"
        f"<header><h1>Tandem benchmarks</h1>{''.join(_heading(results))}"
        f"<nav>{' '.join(links)}</nav></header>\n{body}\n</body></html>\n"
    )


def read(folder: Path) -> list[Results]:
    """All results of a folder, the oldest first."""
    found = [msgspec.json.decode(file.read_bytes(), type=Results) for file in folder.glob("*.json")]
    return sorted(found, key=lambda one: one.date)


def _heading(results: Sequence[Results]) -> Iterator[str]:
    """Machines, dates and commits: one line each, however many there are."""
    days = sorted({one.date[:10] for one in results})
    commits = sorted({one.commit for one in results if one.commit})
    yield f"<p>{_text(' to '.join(dict.fromkeys((days[0], days[-1]))))}"
    yield f", commit {_text(', '.join(commits))}</p>" if commits else "</p>"
    for host in sorted({f"{one.machine.cpu}, {one.machine.cores} cores" for one in results}):
        yield f"<p>{_text(host)}</p>"


def _section(one: Results, plots: Path) -> str:
    quick = ' <span class="quick">quick form</span>' if one.quick else ""
    about = f"{one.date.replace('T', ' ')}, {one.seconds:,.0f} s, {machine.describe(one.machine)}"
    return (
        f'<section id="{_text(one.name)}"><h2>{_text(one.name)}{quick}</h2>'
        f'<p class="note">{_text(about)}</p>'
        f"{''.join(map(_table, one.tables))}{''.join(_images(plots / name for name in one.plots))}"
        "</section>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in table.headers)
    rows = (f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return (
        f"<h3>{_text(table.title)}</h3>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="note">{_text(table.note)}</p>'
    )


def _images(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        if file.is_file():
            data = base64.b64encode(file.read_bytes()).decode()
            yield f'<img alt="{_text(file.stem)}" src="data:image/png;base64,{data}">'


def _text(text: str) -> str:
    return html.escape(text)


def main(
    *, out: Annotated[Path, typer.Option(help="The folder of the results.")] = RESULTS
) -> None:
    """Writes report.html beside the results and prints where it is."""
    results = read(out)
    if not results:
        raise typer.BadParameter(f"{out} holds no results; run a benchmark with --out {out}")
    file = out / PAGE
    file.write_text(page(results, out))
    typer.echo(file.resolve())


if __name__ == "__main__":
    typer.run(main)
