"""`python -m benchmarks.serving.colocated`: the same cores with PD and without, at two lengths.

1P1D: a prefill node, a decode node and the proxy. Colocated: two nodes that both prefill and decode
behind the same proxy. Rounds alternate and those that are not asked idle; every round has prompts
that no cache knows. Users in a closed loop; ITL is every gap between two chunks of an answer: where
a node prefills for one user, the others of that node wait. All figures are at the client.

Both clusters get the same requests and must give the same greedy tokens. Where they do not, a node
is asked alone: if more than near-ties differ, there is no table, and the status is 1.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer

from benchmarks.load.agreement import Agreement, check_beside, tell
from benchmarks.load.client import Client
from benchmarks.load.loop import Pace, Run, drive
from benchmarks.load.request import WITH_IDS, Request
from benchmarks.load.summary import Summary, result
from benchmarks.serving.outputs import failure
from benchmarks.support import machine, report
from benchmarks.support.cluster import NAME, cluster
from benchmarks.support.models import WIDE, random_prompts, save_random
from benchmarks.support.pairs import Spread, alternate, turns
from benchmarks.support.plots import grouped_bars

SECONDS = (300, 60)
PD, COLOCATED = "1P1D", "colocated"
NODES = {PD: (1, 1), COLOCATED: (0, 2)}
USERS = 4
ARENA_BYTES = 512 << 20
RESERVE_S = 15.0
PACE = Pace(at_once=USERS, deadline_s=SECONDS[0])
HEADERS = ("case", "tok/s", "tok/s, ratio", "TTFT ms p50", "ITL ms p50", "p99", "max")


class Size(NamedTuple):
    """Tokens of the prompts by name, requests of each user, and tokens of an answer."""

    prompts: dict[str, int]
    per_user: int
    output: int


WHOLE, QUICK = Size({"short": 128, "long": 2048}, 3, 48), Size({"long": 256}, 1, 16)


class Row(msgspec.Struct, frozen=True):
    """One cluster at one length; milliseconds, pooled over rounds; results as vLLM's bench has.

    `failure`: how many requests failed, if some did; the figures are of the others.
    """

    case: str
    cluster: str
    throughput: Spread
    ratio: Spread
    ttft_p50: float
    itl: tuple[float, float, float]
    failure: str
    results: list[dict[str, Any]]

    @classmethod
    def of(cls, case: str, name: str, runs: Sequence[Run], *, others: Sequence[Run]) -> "Row":
        """The ratio is to `others`, by round. Raises RuntimeError if a round has no answer."""
        summaries, theirs = [Summary.of(run) for run in runs], [Summary.of(run) for run in others]
        for one in (*summaries, *theirs):
            if not one.completed:
                raise RuntimeError(f"{case}: a cluster answered nothing: {one.errors[0]}")
        speeds = [one.output_throughput for one in summaries]
        replies = [reply for run in runs for reply in run.replies if not reply.error]
        itl = 1e3 * np.array(list(itertools.chain.from_iterable(one.itls for one in replies)))
        return cls(
            case,
            name,
            Spread.of(speeds),
            Spread.of_ratio(speeds, [one.output_throughput for one in theirs]),
            1e3 * float(np.percentile([reply.ttft for reply in replies], 50)),
            (float(np.percentile(itl, 50)), float(np.percentile(itl, 99)), float(itl.max())),
            failure(f"{case}, {name}", summaries),
            [result(one, PACE, target=name, model=WIDE) for one in summaries],
        )

    def cells(self) -> list[str]:
        """A line of the table."""
        return [
            f"{self.case}, {self.cluster}",
            self.throughput.show(0),
            self.ratio.show(),
            f"{self.ttft_p50:.0f}",
            *(f"{ms:.1f}" for ms in self.itl),
        ]


def measure(
    found: report.Report, size: Size, rounds: int
) -> tuple[list[Row], dict[str, Agreement]]:
    """Both clusters by turns, at every length, and how their answers compare."""
    rows: list[Row] = []
    agreements = dict.fromkeys(NODES, Agreement())
    with ExitStack() as stack:
        total = len(size.prompts) * len(NODES) * turns(rounds)
        describe = stack.enter_context(report.progress(found.console, total))
        describe("two clusters")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, flags = save_random(WIDE, folder), ("--kv-cache-memory-bytes", str(ARENA_BYTES))
        loop = stack.enter_context(asyncio.Runner())
        up = {
            name: stack.enter_context(cluster(model, *flags, prefill=p, decode=d))
            for name, (p, d) in NODES.items()
        }
        for number, (name, tokens) in enumerate(size.prompts.items()):
            case, until = f"{name}, {tokens:,} tokens", found.share(len(size.prompts) - number)
            ways = {
                kind: _blocking(loop, one.proxy, size, tokens=tokens) for kind, one in up.items()
            }
            runs = alternate(ways, rounds, until=until - RESERVE_S, done=describe(case))
            compared = loop.run(_compare(up[COLOCATED].decode[0], runs, found.ends_at - RESERVE_S))
            agreements = {kind: agreements[kind].plus(compared[kind]) for kind in NODES}
            rows += [Row.of(case, kind, own, others=runs[COLOCATED]) for kind, own in runs.items()]
    return rows, agreements


async def _compare(
    url: str, runs: Mapping[str, Sequence[Run]], ends_at: float
) -> dict[str, Agreement]:
    """Of each cluster over all rounds; `url`: the node that is asked alone."""
    found = dict.fromkeys(runs, Agreement())
    async with Client(url, NAME) as alone:
        for together in zip(*runs.values(), strict=True):
            beside = dict(zip(runs, together, strict=True))
            compared = await check_beside(alone, beside, ends_at=ends_at)
            found = {name: found[name].plus(one) for name, one in compared.items()}
    return found


def _blocking(loop: asyncio.Runner, url: str, size: Size, *, tokens: int) -> Callable[[], Run]:
    seeds = itertools.count(tokens)  # each run has other prompts than those before it
    return lambda: loop.run(_run(url, size, tokens, seed=next(seeds)))


async def _run(url: str, size: Size, tokens: int, *, seed: int) -> Run:
    prompts = random_prompts(USERS * size.per_user, tokens, seed)
    requests = [
        Request(prompt=tuple(one), max_tokens=size.output, sampling=WITH_IDS) for one in prompts
    ]
    async with Client(url, NAME) as client:
        return await drive(client.send, requests, PACE)


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one.")] = 5,
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Throughput and the tail of ITL of 1P1D beside two colocated nodes on the same cores."""
    found = report.Report("colocated", out, SECONDS, cpu="all", quick=quick)
    size, rounds = (QUICK, 1) if quick else (WHOLE, rounds)
    try:
        rows, agreements = measure(found, size, rounds)
    except RuntimeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    for line in filter(None, (row.failure for row in rows)):
        typer.echo(line, err=True)
    holds = tell(found.console, agreements)
    if holds:
        publish(found, rows, size)
    found.save({"rows": rows, "agreements": agreements})
    raise typer.Exit(0 if holds else 1)


def publish(found: report.Report, rows: Sequence[Row], size: Size) -> None:
    """The table and the plot."""
    taken = sorted({len(row.results) for row in rows})
    note = (
        f"{USERS} users, {size.per_user} requests each, {size.output} tokens out; "
        f"{'-'.join(map(str, taken))} rounds; "
        f"servers and client share {machine.describe(found.host)}"
    )
    cells = [row.cells() for row in rows]
    found.publish("PD and colocated", headers=HEADERS, rows=cells, note=note)
    labels = list(dict.fromkeys(row.case for row in rows))
    bars = {
        f"{kind}, {name}": [Spread.of([row.itl[at]]) for row in rows if row.cluster == kind]
        for kind in NODES
        for at, name in ((1, "p99"), (2, "max"))
    }
    grouped_bars(found.plot(), labels, bars, ylabel="ITL, ms")


if __name__ == "__main__":
    typer.run(main)
