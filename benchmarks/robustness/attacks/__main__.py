"""`python -m benchmarks.robustness.attacks`: what a hostile tenant's requests cost its neighbour.

One P, one D and a proxy with two tenants. The neighbour streams answers and asks short new
questions, with and without a grammar; beside it the other tenant does one act after the other, in a
process of its own that gives way to the servers. Each act is compared with the mean of the quiet
times before and after it. An honest tenant that is as busy is one of the acts: what it costs is the
price of shared cores, and no attack.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import psutil
import typer

from benchmarks.robustness.attacks.acts import ACTS, Heard
from benchmarks.robustness.attacks.neighbour import Seen, observe
from benchmarks.support import machine, report
from benchmarks.support.cluster import Cluster, cluster
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars

SECONDS = (1200, 280)
ACT_S, QUICK_ACT_S = 6.0, 1.5
QUICK_ACTS = ("products", "large bodies")
PLACES = 16
SETTLE_S = 15.0
MIB = 2**20
KEYS = """
keys:
  - {name: alice, key: alice-has-this-key-here}
  - {name: bob, key: bob-has-another-one-here}
"""
HEADERS = ("act", "kind", "rate kept", "latency", "with a grammar", "memory, MiB", "bob heard")


class Row(msgspec.Struct, frozen=True):
    """One act beside the quiet time around it; `memory`: bytes that all servers have kept."""

    name: str
    quiet: Seen
    beside: Seen
    memory: int
    heard: Heard

    @property
    def kept(self) -> float:
        return self.beside.tokens_per_s / self.quiet.tokens_per_s

    def cells(self) -> list[str]:
        """One line of the table."""
        heard = ", ".join(f"{n} x {it or 'none'}" for it, n in sorted(self.heard.statuses.items()))
        return [
            self.name,
            ACTS[self.name].kind,
            f"{self.kept:.2f}",
            f"{self.beside.plain / self.quiet.plain:.1f}",
            f"{self.beside.grammar / self.quiet.grammar:.1f}",
            f"{self.memory / MIB:.0f}",
            heard,
        ]


def main(
    *,
    quick: report.Quick = False,
    act: Annotated[list[str] | None, typer.Option(help="Only these acts.")] = None,
    out: report.Out = report.RESULTS,
) -> None:
    """Rates and latencies of a neighbour beside each act, as ratios to quiet times."""
    found = report.Report("attacks", out, SECONDS, cpu="all", quick=quick)
    names = act or (QUICK_ACTS if quick else tuple(ACTS))
    seconds = QUICK_ACT_S if quick else ACT_S
    rows: list[Row] = []
    with _cluster() as up, report.progress(found.console, len(names)) as describe:
        asyncio.run(observe(up.proxy, "alice-has-this-key-here", 2.0))  # first requests are slower
        quiet = asyncio.run(observe(up.proxy, "alice-has-this-key-here", seconds))
        for name in names:
            done = describe(name)
            row, quiet = _row(name, up, quiet=quiet, seconds=seconds)
            rows.append(row)
            done()
    note = (
        f"{seconds:g} s each; rate of a stream beside an act to that of quiet times, times of new "
        f"requests alike; {PLACES} places; {machine.describe(found.host)}"
    )
    found.publish(
        "A neighbour beside attacks", headers=HEADERS, rows=[row.cells() for row in rows], note=note
    )
    bars = {"rate kept": [Spread.of([row.kept]) for row in rows]}
    grouped_bars(
        found.plot(), [row.name for row in rows], bars, ylabel="of the quiet rate", marks=(0.5,)
    )
    found.save(rows)
    if problems := [error for row in rows for error in row.beside.errors]:
        found.console.print(f"the neighbour got errors: {problems[:5]}")


@contextmanager
def _cluster() -> Iterator[Cluster]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as keys:  # only its owner may read it
        keys.write(KEYS)
        keys.flush()
        limits = ("--api-keys-file", keys.name, "--max-concurrent-requests", str(PLACES))
        with cluster(DEMO_MODEL, of_proxy=limits) as up:
            yield up


def _row(name: str, up: Cluster, *, quiet: Seen, seconds: float) -> tuple[Row, Seen]:
    """The act's row, and the quiet time after it."""
    before = _memory(up)
    command = [sys.executable, "-m", "benchmarks.robustness.attacks.acts", name, up.proxy]
    command += ["bob-has-another-one-here", str(seconds + 1.0)]
    attacker = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        time.sleep(1.0)  # it starts
        beside = asyncio.run(observe(up.proxy, "alice-has-this-key-here", seconds))
        told, _ = attacker.communicate(timeout=seconds + 2 * SETTLE_S)
    finally:
        attacker.kill()
        attacker.wait()
    memory = _settled(up, before)
    after = asyncio.run(observe(up.proxy, "alice-has-this-key-here", seconds / 2))
    around = Seen(
        (quiet.tokens_per_s + after.tokens_per_s) / 2,
        quiet.plain_s + after.plain_s,
        quiet.grammar_s + after.grammar_s,
        [],
    )
    return Row(name, around, beside, memory, msgspec.json.decode(told, type=Heard)), after


def _settled(up: Cluster, before: int) -> int:
    """Bytes kept once the act has ended, as soon as they are few, or else after a while."""
    end = time.monotonic() + SETTLE_S
    while (more := _memory(up) - before) > 50 * MIB and time.monotonic() < end:
        time.sleep(0.5)
    return more


def _memory(up: Cluster) -> int:
    """Private bytes of the servers and of the processes that they have."""
    total = 0
    for server in up.servers:
        own = psutil.Process(server.process.pid)
        for process in (own, *own.children(recursive=True)):
            try:
                total += process.memory_full_info().uss
            except psutil.NoSuchProcess:
                continue
    return total


if __name__ == "__main__":
    typer.run(main)
