"""`python -m benchmarks.hand_over`: what a hand-over costs beside its bytes, and beside decoding.

Real nodes on this machine, a prefill and a decode node per transport, each in its own process with
one torch thread; this process asks them over the nodes' own gRPC, where the proxy would stand. The
model is random, with 32 KiB of K/V per token. Both nodes verify what is pulled, as they do anyway.

Control: from P's last output (its engine thread has made it) to D's engine thread about to compute
the request's first step, minus the bytes. Inside: both gRPC calls of the client, the signature, the
waits for D's engine thread, the plan, the question to P and its answer. Outside: prefill, the reads
and D's hash of them, the first step itself, HTTP, the proxy, the way of tokens to the client.
`idle`: D does nothing else, which is judged. `busy`: D decodes others, so that a hand-over waits
for the end of a step twice.

Overlap: 8 requests decode on D while it pulls large prompts back to back, beside the same steps
without pulls and the same pulls without decoding.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks.hand_over.control_cost import PARTS, ControlRow, measure_control
from benchmarks.hand_over.overlap import Overlap, measure_overlap
from benchmarks.hand_over.pd_pair import Pair, pair
from benchmarks.support import machine, report
from benchmarks.support.models import WIDE, save_random
from benchmarks.support.pairs import Spread, turns
from benchmarks.support.plots import grouped_bars
from serving.process import configure_logging

SECONDS = (300, 60)
TRANSPORTS = ("shm", "nixl")
TARGET_MS = 5.0
P_BYTES, D_BYTES = 512 << 20, 1_200 << 20
CONTROL_HEADERS = ("case", "control", "p99", *PARTS, "<= 5 ms")
OVERLAP_HEADERS = (
    "case",
    "MB",
    "step ms",
    "step, with pulls / without",
    "slowest step, same",
    "pull ms",
    "pull, with decode / without",
    "serial / together",
)


class Size(NamedTuple):
    """Tokens of the prompts whose control is judged; tokens and number of those that overlap."""

    control: tuple[int, ...]
    pulled: int
    pulls: int


WHOLE, QUICK = Size((64, 1_024), 7_900, 6), Size((64,), 1_024, 2)


@contextmanager
def pairs(loop: asyncio.Runner, transports: Sequence[str]) -> Iterator[dict[str, Pair]]:
    """A pair of nodes by transport; pulls of one node run one after another."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = save_random(WIDE, Path(folder))
        yield {
            name: stack.enter_context(
                pair(loop, model, name, p_bytes=P_BYTES, d_bytes=D_BYTES, pulls=1)
            )
            for name in transports
        }


def run(
    transports: Sequence[str], rounds: int, found: report.Report, *, size: Size
) -> tuple[list[ControlRow], list[Overlap]]:
    """Control of every length, then overlap of every transport."""
    control: list[ControlRow] = []
    total = turns(rounds) * len(transports) * (2 * len(size.control) + 3)
    with asyncio.Runner() as loop, report.progress(found.console, total) as tell:
        tell("starting the nodes")
        with pairs(loop, transports) as opened:
            parts = len(size.control) + len(opened)
            for number, tokens in enumerate(size.control):
                until, done = found.share(parts - number), tell(f"control, {tokens:,} tokens")
                control += measure_control(
                    loop, opened, tokens, rounds=rounds, until=until, done=done
                )
            overlap = [
                measure_overlap(
                    loop,
                    name,
                    one,
                    tokens=size.pulled,
                    pulls=size.pulls,
                    times=(rounds, found.share(len(opened) - number)),
                    done=tell(f"overlap, {name}"),
                )
                for number, (name, one) in enumerate(opened.items())
            ]
    return control, overlap


def control_cells(row: ControlRow) -> list[str]:
    """One line of the table."""
    met = "met" if row.control.median <= TARGET_MS else "MISSED"
    return [
        row.case,
        row.control.show(1),
        f"{row.p99:.1f}",
        *(f"{value:.2f}" for value in row.parts.values()),
        met if row.is_judged else "not judged",
    ]


def overlap_cells(row: Overlap, tokens: int) -> list[str]:
    """One line of the table."""
    return [
        f"{row.transport}, {tokens:,} tokens",
        f"{row.pulled_bytes / 1e6:.0f}",
        f"{row.step_alone.median:.1f}",
        _shown(row.step_ratio),
        _shown(row.slowest_ratio),
        f"{row.pull_alone.median:.0f}",
        row.pull_ratio.show(),
        _shown(row.serial_ratio),
    ]


def _shown(spread: Spread | None) -> str:
    return "no overlap" if spread is None else spread.show()


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one warm-up.")] = 7,
    transport: Annotated[list[str] | None, typer.Option(help="[shm, nixl]")] = None,
    cpu: Annotated[str, typer.Option(help="Cores to run on, as `0,1`, or `all`.")] = "all",
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Control cost of a hand-over by part, and steps and pulls at the same time."""
    found = report.Report("hand_over", out, SECONDS, cpu=cpu, quick=quick)
    configure_logging("warning")
    transports, size = transport or list(TRANSPORTS), WHOLE
    if quick:
        rounds, transports, size = 1, transports[:1], QUICK
    control, overlap = run(transports, rounds, found, size=size)
    host = machine.describe(found.host)
    note = f"milliseconds, medians; at most {rounds} rounds; each node in a process; {host}"
    for title, headers, rows in (
        ("Control cost", CONTROL_HEADERS, list(map(control_cells, control))),
        ("Overlap", OVERLAP_HEADERS, [overlap_cells(row, size.pulled) for row in overlap]),
    ):
        found.publish(title, headers=headers, rows=rows, note=note)
    labels = [row.case for row in control]
    series = {"control": [row.control for row in control]}
    grouped_bars(found.plot(), labels, series, ylabel="ms", marks=[TARGET_MS] * len(labels))
    found.save({"control": control, "overlap": overlap})


if __name__ == "__main__":
    typer.run(main)
