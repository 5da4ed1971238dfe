"""`python -m benchmarks.serving.proxy_cost`: what the proxy takes of a core.

Three processes: the proxy with one P and one D, a pass-through that is as small as one can be
(`pass_through.py`), and what both forward to (`upstream.py`), where nothing is computed. The same
client asks both in turn. Counted are user and system seconds of the proxy's, or the pass-through's,
own process with all its threads; not those of client, nodes and upstream.
"""

import os
import tempfile
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import msgspec
import typer

from benchmarks.serving.proxy_cost.load import (
    Target,
    micros_per_message,
    micros_per_request,
    micros_per_token,
)
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread, alternate, turns
from benchmarks.support.plots import grouped_bars
from benchmarks.support.processes import Server, processes

SECONDS = (180, 25)
ROUNDS, QUICK_ROUNDS = 7, 1
REQUESTS, QUICK_REQUESTS = 200, 20
STREAMS, QUICK_STREAMS = 64, 16
TOKENS, QUICK_TOKENS = 128, 48
BOUNDS = (3.0, 2.0)
ANSWER_S = 10.0
HEADERS = ("what", "proxy, us", "pass-through, us", "ratio", "at most")


class Case(msgspec.Struct, frozen=True):
    """CPU microseconds of both sides by round, and the highest ratio that is wanted."""

    name: str
    proxy: list[float]
    pass_through: list[float]
    bound: float

    def ratio(self) -> Spread:
        return Spread.of_ratio(self.proxy, self.pass_through)

    def row(self) -> list[str]:
        """One line of the table."""
        sides = (Spread.of(self.proxy), Spread.of(self.pass_through))
        missed = " (missed)" if self.ratio().median > self.bound else ""
        return [
            self.name,
            *(side.show(0) for side in sides),
            self.ratio().show(),
            f"{self.bound:g}{missed}",
        ]


def main(
    *,
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """CPU of a request with 8,192 token ids, and of a token of one of 64 streams."""
    found = report.Report("proxy_cost", out, SECONDS, cpu="all", quick=quick)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    num_requests = QUICK_REQUESTS if quick else REQUESTS
    num_streams, num_tokens = (QUICK_STREAMS, QUICK_TOKENS) if quick else (STREAMS, TOKENS)
    works = {
        "request of 8,192 token ids": partial(micros_per_request, num_requests=num_requests),
        f"token of {num_streams} streams": partial(
            micros_per_token, num_streams=num_streams, num_each=num_tokens
        ),
    }
    cases = []
    with (
        tempfile.TemporaryDirectory() as folder,
        processes(Path(folder), ("benchmarks.serving.proxy_cost.upstream",)) as (upstream,),
    ):
        nodes = _nodes(upstream.url())
        commands = _commands(upstream.url(), nodes)
        with (
            processes(Path(folder), *commands) as servers,
            report.progress(found.console, (2 * len(works) + 1) * turns(rounds)) as describe,
        ):
            targets = dict(zip(("proxy", "pass-through"), map(_target, servers), strict=True))
            # The time that is left is shared with gRPC alone, which comes last.
            for left, bound, (name, work) in zip((3, 2), BOUNDS, works.items(), strict=True):
                ways = {side: partial(work, target) for side, target in targets.items()}
                taken = alternate(ways, rounds, until=found.share(left), done=describe(name))
                cases.append(Case(name, taken["proxy"], taken["pass-through"], bound))
            alone = partial(micros_per_message, nodes["decode"].removeprefix("grpc://"))
            done = describe("gRPC alone")
            messages = alternate(
                {"": partial(alone, STREAMS, num_tokens)}, rounds, until=found.share(1), done=done
            )[""]
    note = f"at most {rounds} rounds; {machine.describe(found.host)}"
    rows = [case.row() for case in cases]
    found.publish("CPU of the proxy", headers=HEADERS, rows=rows, note=note)
    alone_row = [f"token of {num_streams} streams", Spread.of(messages).show(0)]
    note = "read by gRPC's client as the proxy sets it, and thrown away: a part of the above"
    found.publish("gRPC alone", headers=("what", "us"), rows=[alone_row], note=note)
    bars = {"proxy / pass-through": [case.ratio() for case in cases]}
    labels = [case.name for case in cases]
    grouped_bars(found.plot(), labels, bars, ylabel="times", marks=BOUNDS)
    found.save({"cases": cases, "messages": messages})


def _nodes(upstream: str) -> dict[str, str]:
    """URL by kind."""
    with urlopen(f"{upstream}/nodes", timeout=ANSWER_S) as reply:
        return msgspec.json.decode(reply.read(), type=dict[str, str])


def _commands(upstream: str, nodes: dict[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the proxy and of the pass-through."""
    roles = [word for kind, url in nodes.items() for word in (f"--{kind}", url)]
    return ("proxy", *roles, "--port", "0"), (
        "benchmarks.serving.proxy_cost.pass_through",
        upstream,
    )


def _target(server: Server) -> Target:
    return Target(server.url(), server.process.pid)


if __name__ == "__main__":
    os.environ["GRPC_EXPERIMENTS"] = "-event_engine_client"
    typer.run(main)
