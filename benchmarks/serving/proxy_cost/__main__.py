"""`python -m benchmarks.serving.proxy_cost`: what the proxy takes of a core.

The proxy with one P and one D, a pass-through that is as small as one can be (`pass_through.py`),
and what both forward to, where nothing is computed: nodes of this project (`upstream.py`), or
workers that speak vLLM's HTTP API (`--backend vllm`, `vllm_worker.py`). There vLLM's toy proxy may
stand beside them (`--toy-proxy`). The same client asks all in turn. Counted are user and system
seconds of each one's own process with all its threads; not those of client, nodes and workers.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer

from benchmarks.serving.proxy_cost.load import (
    Target,
    micros_per_message,
    micros_per_request,
    micros_per_token,
)
from benchmarks.serving.proxy_cost.sides import (
    TOY,
    Sides,
    before_nodes,
    before_vllm_workers,
)
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread, alternate, turns
from benchmarks.support.plots import grouped_bars
from benchmarks.support.toy_proxy import ToyProxy

ROUNDS = (7, 1)
REQUESTS = (200, 20)
STREAMS = (64, 16)
TOKENS = (128, 48)


class Backend(StrEnum):
    """Whose workers are behind the proxy."""

    TANDEM = "tandem"
    VLLM = "vllm"


NAMES = {Backend.TANDEM: "proxy_cost", Backend.VLLM: "proxy_cost_vllm"}
# Seconds, whole and in the quick form, and the ratios to the pass-through that are wanted.
SECONDS = {Backend.TANDEM: (180, 25), Backend.VLLM: (300, 40)}
BOUNDS = {Backend.TANDEM: (3.0, 2.0), Backend.VLLM: None}


class Case(msgspec.Struct, frozen=True):
    """CPU microseconds by side and round."""

    name: str
    taken: dict[str, list[float]]

    @property
    def ratios(self) -> dict[str, Spread]:
        """The proxy's to those of each other side."""
        proxy, *others = self.taken
        return {it: Spread.of_ratio(self.taken[proxy], self.taken[it]) for it in others}

    def row(self, bound: float | None) -> list[str]:
        """One line of the table. `bound`: the highest ratio to the last side that is wanted."""
        *_, last = self.ratios.values()
        missed = " (missed)" if bound is not None and last.median > bound else ""
        return [
            self.name,
            *(Spread.of(it).show(0) for it in self.taken.values()),
            *(ratio.show() for ratio in self.ratios.values()),
            *([] if bound is None else [f"{bound:g}{missed}"]),
        ]


def main(
    *,
    backend: Annotated[
        Backend, typer.Option(help="Whose workers are behind the proxy.")
    ] = Backend.TANDEM,
    toy_proxy: Annotated[
        Path | None, typer.Option(help="vllm: the file of vLLM's toy proxy. [it is left out]")
    ] = None,
    toy_python: Annotated[Path, typer.Option(help="The Python that runs it.")] = Path("python3"),
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """CPU of a request with 8,192 token ids, and of a token of one of 64 streams."""
    found = report.Report(NAMES[backend], out, SECONDS[backend], cpu="all", quick=quick)
    toy = None if toy_proxy is None else ToyProxy(toy_python, toy_proxy)
    works = _works(quick=quick)
    with TemporaryDirectory() as folder, _sides(backend, Path(folder), toy) as sides:
        num_ways = len(works) * len(sides.targets) + (sides.decode is not None)
        with report.progress(found.console, num_ways * turns(ROUNDS[quick])) as describe:
            cases = []
            # The time that is left is shared with gRPC alone, which comes last.
            for left, (name, work) in zip((3, 2), works.items(), strict=True):
                ways = {side: partial(work, it) for side, it in sides.targets.items()}
                until, done = found.share(left), describe(name)
                taken = alternate(ways, ROUNDS[quick], until=until, done=done)
                cases.append(Case(name, taken))
            messages = []
            if sides.decode is not None:
                alone = partial(micros_per_message, sides.decode, STREAMS[False], TOKENS[quick])
                until, done = found.share(1), describe("gRPC alone")
                messages = alternate({"": alone}, ROUNDS[quick], until=until, done=done)[""]
    _publish(found, cases, messages, backend=backend, rounds=ROUNDS[quick])


def _works(*, quick: bool) -> dict[str, Callable[[Target], float]]:
    """CPU microseconds of a side, by the name of the case."""
    return {
        "request of 8,192 token ids": partial(micros_per_request, num_requests=REQUESTS[quick]),
        f"token of {STREAMS[quick]} streams": partial(
            micros_per_token, num_streams=STREAMS[quick], num_each=TOKENS[quick]
        ),
    }


def _sides(backend: Backend, folder: Path, toy: ToyProxy | None) -> AbstractContextManager[Sides]:
    if backend is Backend.VLLM:
        return before_vllm_workers(folder, toy)
    return before_nodes(folder)


def _publish(
    found: report.Report,
    cases: list[Case],
    messages: list[float],
    *,
    backend: Backend,
    rounds: int,
) -> None:
    bounds = BOUNDS[backend]
    headers = ["what", *(f"{side}, us" for side in cases[0].taken)]
    headers += [f"/ {side}" for side in cases[0].ratios]
    headers += ["at most"] if bounds else []
    rows = [case.row(bound) for case, bound in zip(cases, bounds or (None, None), strict=True)]
    note = f"at most {rounds} rounds; {machine.describe(found.host)}"
    if backend is Backend.VLLM and TOY not in cases[0].taken:
        note += "; vLLM's toy proxy is left out (--toy-proxy)"
    found.publish("CPU of the proxy", headers=headers, rows=rows, note=note)
    if messages:
        alone_row = [f"token of {STREAMS[False]} streams", Spread.of(messages).show(0)]
        note = "read by gRPC's client as the proxy sets it, and thrown away: a part of the above"
        found.publish("gRPC alone", headers=("what", "us"), rows=[alone_row], note=note)
    bars = {f"proxy / {side}": [it.ratios[side] for it in cases] for side in cases[0].ratios}
    labels = [case.name for case in cases]
    grouped_bars(found.plot(), labels, bars, ylabel="times", marks=bounds)
    found.save({"cases": cases, "messages": messages})


if __name__ == "__main__":
    os.environ["GRPC_EXPERIMENTS"] = "-event_engine_client"
    typer.run(main)
