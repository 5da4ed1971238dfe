"""`python -m benchmarks.serving.vllm_workers`: Tandem's proxy in front of vLLM's own workers.

Starts vLLM's servers with NixlConnector on this machine, and in front of them Tandem's proxy and
vLLM's toy proxy. Three parts, `--part` names one:

equal  greedy answers through each proxy beside those of one vLLM node alone, token by token; of a
       hybrid without prefix caching, and of a model with attention only
kill   a prefill or a decode worker is killed under 16 streams: each must go on as if nothing had
       been, or end with an error; vLLM must have all of its blocks back after its lease
route  2P2D with KV events: hit tokens of all prefill workers beside those of one endless cache

`--toy-proxy` is `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py` of vLLM's repository;
its own Python runs it. The status is 1 if a part does not hold through Tandem's proxy.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.serving.vllm_workers import equal, fronts, kill, route
from benchmarks.serving.vllm_workers.fronts import Stack
from benchmarks.support import machine, report
from benchmarks.support.models import PEER, PEER_ATTENTION, add_tokenizer, save_random
from benchmarks.support.report import Cells
from benchmarks.support.vllm_peer import Setup, Workers, workers

SECONDS = (2400.0, 600.0)
# Answers to compare, whole and in the quick form.
PROMPTS = (200, 20)
# Of the ideal hits.
TARGET = 0.95
SEED = 7
# Of routing: where no worker has a queue, the best place for a prompt is the one that has most of
# it; else a place that is free may be better.
ALONE, BUSY = 1, 4
ROUTES = (("prefix_aware", ALONE), ("prefix_aware", BUSY), ("round_robin", BUSY))


class Part(StrEnum):
    """A part of the benchmark."""

    EQUAL = "equal"
    KILL = "kill"
    ROUTE = "route"


class Model(StrEnum):
    """One of the two models."""

    HYBRID = "hybrid"
    ATTENTION = "attention"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line."""

    models: tuple[Model, ...]

    vllm: Path
    toy_proxy: Path
    prompts: int


MODELS = {Model.HYBRID: PEER, Model.ATTENTION: PEER_ATTENTION}


class Bench:
    """One run: its servers, and the line that says what it does now."""

    def __init__(self, options: Options, found: report.Report, folder: Path) -> None:
        self.options, self.found = options, found
        self._folder = folder

    def tell(self, what: str) -> None:
        """Shows what comes next."""
        self.found.console.print(what, style="dim", highlight=False)

    @contextmanager
    def up(
        self, model: Model, *, prefill: int = 1, decode: int = 1
    ) -> Iterator[tuple[Stack, Workers]]:
        """Workers of one of MODELS; the attention-only one caches prefixes."""
        own = self.options
        saved = self._folder / MODELS[model]
        if not saved.exists():
            add_tokenizer(save_random(MODELS[model], self._folder))
        stack = Stack(Setup(own.vllm, saved, self._folder), own.toy_proxy)
        start = workers(
            stack.setup,
            prefill=prefill,
            decode=decode,
            caching=model is Model.ATTENTION,
            tell=self._starts,
        )
        self.tell(f"{model}: {prefill} prefill and {decode} decode workers of vLLM start")
        with start as up:
            yield stack, up

    def _starts(self, name: str, seconds: float) -> None:
        self.tell(f"{name} has been starting for {seconds:.0f} s")


def run_equal(bench: Bench) -> tuple[list[equal.Row], bool]:
    """Both models on 1P1D."""
    rows: list[equal.Row] = []
    requests = equal.prompts(bench.options.prompts)
    for model in bench.options.models:
        with bench.up(model) as (stack, up):
            part = equal.measure(
                *(stack, up, requests),
                model=model,
                tell=bench.tell,
            )
            rows += asyncio.run(part)
    note = f"{len(requests)} greedy answers of {equal.OUTPUT} tokens, {equal.AT_ONCE} at once"
    _publish(bench, "Equal answers", note, headers=equal.HEADERS, rows=list(map(equal.cells, rows)))
    return rows, all(row.holds for row in rows if row.through == fronts.TANDEM)


def run_kill(bench: Bench) -> tuple[list[kill.Row], bool]:
    """Both models on 1P2D: P is killed, then a D, under each proxy."""
    rows = [row for model in bench.options.models for row in _kills(bench, model)]
    sizes = f"{kill.PROMPT} + {kill.OUTPUT} tokens"
    note = f"{kill.STREAMS} streams of {sizes}; lease {kill.LEASE_S:.0f} s"
    _publish(bench, "Kills", note, headers=kill.HEADERS, rows=list(map(kill.cells, rows)))
    return rows, all(row.holds for row in rows if fronts.TANDEM in row.through)


def _kills(bench: Bench, model: Model) -> list[kill.Row]:
    rows: list[kill.Row] = []
    with bench.up(model, decode=2) as (stack, up):
        for open_front, (number, role) in product(_fronts(bench, stack, up), enumerate("PD")):
            with open_front() as front:
                named = msgspec.structs.replace(front, name=f"{model}, {front.name}")
                part = kill.measure(named, up, role, tell=bench.tell, seed=SEED + number)
                rows.append(asyncio.run(part))
    return rows


def run_route(bench: Bench) -> tuple[list[route.Row], bool]:
    """The attention-only model on 2P2D: the toy proxy, and each of ROUTES."""
    rows: list[route.Row] = []
    with bench.up(Model.ATTENTION, prefill=2, decode=2) as (stack, up):
        opens: list[tuple[Callable[[], Any], int]] = [(partial(fronts.toy, stack, up), BUSY)]
        for policy, at_once in ROUTES:
            words = ("--routing-policy", policy)
            name = f"{fronts.TANDEM}, {policy}"
            opens.append((partial(fronts.tandem, stack, up, *words, name=name), at_once))
        for number, (open_front, at_once) in enumerate(opens):
            with open_front() as front:
                part = route.measure(front, up, at_once, tell=bench.tell, seed=SEED + number)
                rows.append(asyncio.run(part))
    note = f"an answer has {route.OUTPUT} tokens"
    _publish(bench, "Routing", note, headers=route.HEADERS, rows=list(map(route.cells, rows)))
    judged = [row for row in rows if row.through.endswith(ROUTES[0][0])]
    return rows, all(row.share >= TARGET and not row.errors for row in judged)


def _fronts(bench: Bench, stack: Stack, up: Workers) -> list[Callable[[], Any]]:
    return [partial(fronts.toy, stack, up), partial(fronts.tandem, stack, up)]


def _publish(bench: Bench, title: str, note: str, *, headers: Cells, rows: Sequence[Cells]) -> None:
    host = machine.describe(bench.found.host)
    bench.found.publish(title, headers=headers, rows=rows, note=f"{note}; all share {host}")


RUNS: dict[Part, Callable[[Bench], tuple[list[Any], bool]]] = {
    Part.EQUAL: run_equal,
    Part.KILL: run_kill,
    Part.ROUTE: run_route,
}


def main(
    *,
    vllm: Annotated[Path, typer.Option(help="vLLM's program, `vllm`.")],
    toy_proxy: Annotated[Path, typer.Option(help="The file of vLLM's toy proxy.")],
    part: Annotated[
        list[Part] | None, typer.Option(help="Several times for several. [all]")
    ] = None,
    model: Annotated[
        list[Model] | None, typer.Option(help="Of equal and kill; several times for both. [both]")
    ] = None,
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Tandem's proxy in front of vLLM's workers, beside vLLM's toy proxy."""
    found = report.Report("vllm_workers", out, SECONDS, cpu="all", quick=quick)
    options = Options(
        vllm=vllm,
        toy_proxy=toy_proxy,
        models=tuple(model or Model),
        prompts=PROMPTS[quick],
    )
    rows: dict[str, list[Any]] = {}
    held = True
    with TemporaryDirectory() as folder:
        bench = Bench(options, found, Path(folder))
        for one in part or list(Part):
            rows[one], holds = RUNS[one](bench)
            held = held and holds
    found.save(rows)
    raise typer.Exit(not held)


if __name__ == "__main__":
    typer.run(main)
