"""`python -m benchmarks.engine.engine_vs_llama`: tokens/s of engine and llama.cpp, and two floors.

Both load the same random checkpoint of 98 million parameters and run on the same core; rounds
alternate. Ours is a node: event loop, engine thread, scheduler, sampler, paged arena. Theirs are
`llama-batched-bench` and `llama-bench`, which schedule nothing. Builds nothing: `--llama` says
where somebody built them. Without it there are Tandem and the floors.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec
import torch
import typer

from benchmarks.support import report
from benchmarks.support.family_models import SHARED
from benchmarks.support.floors import gemm_floor, stream_floor
from benchmarks.support.large_models import LARGE, LARGE_VOCABULARY
from benchmarks.support.llama_cpp import LlamaCpp, LlamaCppError
from benchmarks.support.machine import describe
from benchmarks.support.models import add_tokenizer, count_parameters, save_random
from benchmarks.support.pairs import Spread, alternate
from benchmarks.support.plots import grouped_bars
from benchmarks.support.tandem_engine import TandemNode, state_bytes
from benchmarks.support.work import BATCHES, DECODE, PREFILL, Work

SECONDS = (1500, 60)
QUICK_MODEL = "mamba2"
# Fewer at a larger batch, whose steps take longer.
DECODE_TOKENS = MappingProxyType({1: 96, 8: 64, 32: 32})
WARM_TOKENS = 2
# 32 sequences with states of 8 MB each.
ARENA_BYTES = 1 << 30
ABSENT = Spread(nan, nan, nan)
HEADERS = (
    "case",
    "Tandem tok/s",
    "llama.cpp tok/s",
    "ratio (min-max)",
    "stream floor",
    "GEMM floor",
    "of the lower one (min-max)",
    "target",
)


@dataclass(slots=True, frozen=True)
class Precision:
    """One way in which Tandem keeps weights, and the GGUF files that run beside it.

    `options` of the node; `weight_bytes` of one parameter; `product`: what the GEMM floor
    multiplies.
    """

    options: Mapping[str, str]
    peers: tuple[str, ...]
    weight_bytes: float
    product: torch.dtype


# llama.cpp's 8 bits stand beside 16, too, since they are what it does best at batch 1.
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "f32": Precision({"dtype": "float32"}, ("f32",), 4, torch.float32),
        "bf16": Precision({"dtype": "bfloat16"}, ("bf16", "q8_0"), 2, torch.bfloat16),
        # 8 bits and a float32 scale for 64 of them.
        "int8": Precision(
            {"dtype": "bfloat16", "quantization": "int8"}, ("q8_0",), 1.0625, torch.int8
        ),
    }
)
# Least ratios to a peer, by precision, peer and batch of decode.
PEER_TARGETS: Mapping[tuple[str, str, int], float] = MappingProxyType(
    {
        ("bf16", "bf16", 1): 1.0,
        ("bf16", "bf16", 8): 1.3,
        ("bf16", "bf16", 32): 1.6,
        ("bf16", "q8_0", 8): 1.3,
        ("bf16", "q8_0", 32): 1.6,
        ("int8", "q8_0", 1): 0.8,
        ("int8", "q8_0", 8): 1.0,
        ("int8", "q8_0", 32): 1.0,
    }
)
FLOOR_TARGETS: Mapping[tuple[str, str, int], float] = MappingProxyType(
    {("f32", DECODE, 1): 0.8, ("f32", PREFILL, 1): 0.75, ("bf16", PREFILL, 1): 0.75}
)


class Case(msgspec.Struct, frozen=True):
    """One measurement: a phase at a batch size, of one model in one precision."""

    model: str
    precision: str
    work: Work

    @property
    def name(self) -> str:
        """`granite bf16 decode, batch 8`."""
        return f"{self.model} {self.precision} {self.work.name}"


class Peer(msgspec.Struct, frozen=True):
    """Tokens per second of llama.cpp with one file, and Tandem's ratio to it by round."""

    kind: str
    speed: Spread
    ratio: Spread


class Row(msgspec.Struct, frozen=True):
    """Tokens per second of one case; `of_floor`: Tandem's ratio to the lower floor.

    The floors are the highest of all rounds: one that a slow moment of the machine lowers is none.
    """

    case: Case
    tandem: Spread
    stream: float
    gemm: float
    of_floor: Spread
    peers: list[Peer]

    @property
    def shown(self) -> list[Peer | None]:
        """One per line of the table: without llama.cpp one line, which has no peer."""
        return [*self.peers] or [None]


@dataclass(slots=True, frozen=True)
class Sides:
    """One checkpoint in a running node, and as files for llama.cpp, by kind.

    `state_bytes` of one sequence.
    """

    node: TandemNode
    parameters: int
    state_bytes: int
    vocabulary: int
    llama: LlamaCpp | None
    files: Mapping[str, Path]

    def peer_speed(self, kind: str, work: Work) -> float:
        """Tokens per second of llama.cpp."""
        assert self.llama is not None
        file = self.files[kind]
        if work.phase == PREFILL:
            return self.llama.prefill(file, work.prompt_tokens)
        sizes = {"prompt": work.prompt_tokens, "tokens": work.new_tokens, "batch": work.batch}
        return self.llama.decode(file, **sizes)


def measure(
    case: Case, sides: Sides, rounds: int, *, until: float, done: Callable[[], None]
) -> Row:
    """One case in alternating rounds; bandwidth and GEMM rate are measured in each of them."""
    work, precision = case.work, PRECISIONS[case.precision]
    prompts = work.prompts(sides.vocabulary)
    # llama.cpp's programs warm up on their own.
    sides.node.generate(prompts, min(WARM_TOKENS, work.new_tokens))
    ways: dict[str, Callable[[], float]] = {
        "tandem": lambda: work.rate(sides.node.generate(prompts, work.new_tokens)),
        "stream": lambda: stream_floor(
            work, int(precision.weight_bytes * sides.parameters), sides.state_bytes
        ),
        "gemm": lambda: gemm_floor(sides.parameters, precision.product),
    }
    for kind in sides.files:
        ways[kind] = partial(sides.peer_speed, kind, work)
    rates = alternate(ways, rounds, warmups=0, until=until, done=done)
    tandem, stream, gemm = rates["tandem"], max(rates["stream"]), max(rates["gemm"])
    return Row(
        case,
        Spread.of(tandem),
        stream,
        gemm,
        Spread.of([speed / min(stream, gemm) for speed in tandem]),
        [
            Peer(kind, Spread.of(rates[kind]), Spread.of_ratio(tandem, rates[kind]))
            for kind in sides.files
        ],
    )


def cases_of(models: Sequence[str], only: Sequence[str]) -> list[Case]:
    """Prefill, then decode at every batch size; those whose names have one of `only` in them."""
    decodes = (Work(DECODE, batch, DECODE_TOKENS[batch]) for batch in BATCHES)
    works = [Work(PREFILL, 1, 1), *decodes]
    every = [Case(model, one, work) for model in models for one in PRECISIONS for work in works]
    return [case for case in every if not only or any(part in case.name for part in only)]


@contextmanager
def both_sides(
    model: str, precision: str, folder: Path, *, llama: LlamaCpp | None, threads: int
) -> Iterator[Sides]:
    """The random checkpoint, made once in `folder`; the node is closed with the block."""
    checkpoint = folder / model
    if not checkpoint.exists():
        save_random(model, folder)
        add_tokenizer(checkpoint)
    chosen = PRECISIONS[precision]
    files = {kind: llama.convert(checkpoint, kind) for kind in chosen.peers} if llama else {}
    fixed = {"kv_cache_memory_bytes": ARENA_BYTES, "num_threads": threads}
    options = {**fixed, **chosen.options}
    with TandemNode(checkpoint, options) as node:
        yield Sides(
            node,
            count_parameters(checkpoint),
            state_bytes(checkpoint, chosen.options["dtype"]),
            LARGE_VOCABULARY if model in LARGE else SHARED["vocab_size"],
            llama,
            files,
        )


def run(
    cases: Sequence[Case], rounds: int, found: report.Report, *, llama: LlamaCpp | None
) -> list[Row]:
    """All cases; those of one model in one precision follow each other and share a node."""
    rows: list[Row] = []
    ways = {name: 3 + (len(one.peers) if llama else 0) for name, one in PRECISIONS.items()}
    total = rounds * sum(ways[case.precision] for case in cases)
    with (
        tempfile.TemporaryDirectory() as folder,
        report.progress(found.console, total) as describe,
    ):
        for (model, precision), own in groupby(cases, lambda case: (case.model, case.precision)):
            describe(f"{model} {precision}")
            threads = found.host.threads
            with both_sides(model, precision, Path(folder), llama=llama, threads=threads) as sides:
                first = len(rows)
                rows += [
                    measure(
                        case,
                        sides,
                        rounds,
                        until=found.share(len(cases) - place),
                        done=describe(case.name),
                    )
                    for place, case in enumerate(own, first)
                ]
    return rows


def verdict(case: Case, of_floor: Spread, peer: Peer | None) -> str:
    """A line's target and whether it is met: of the ratio to the peer, or of that to the floor."""
    work = case.work
    if peer is not None and work.phase == DECODE:
        target = PEER_TARGETS.get((case.precision, peer.kind, work.batch))
        if target is not None:
            return f"ratio >= {target} {_met(peer.ratio, target)}"
    target = FLOOR_TARGETS.get((case.precision, work.phase, work.batch))
    return "-" if target is None else f"floor >= {target} {_met(of_floor, target)}"


def _met(ratio: Spread, target: float) -> str:
    return "met" if ratio.median >= target else "MISSED"


def lines(row: Row) -> list[list[str]]:
    """Lines of the table: one per file of llama.cpp, or one without."""
    made = []
    for peer in row.shown:
        beside = f" beside {peer.kind}" if peer else ""
        made.append(
            [
                f"{row.case.name}{beside}",
                _speed(row.tandem.median),
                _speed(peer.speed.median) if peer else "-",
                peer.ratio.show() if peer else "-",
                _speed(row.stream),
                _speed(row.gemm),
                row.of_floor.show(),
                verdict(row.case, row.of_floor, peer),
            ]
        )
    return made


def _speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Ratios as bars by model and file, one per phase and batch; without a peer, of the floor."""
    ratios: dict[tuple[str, str], Spread] = {}
    for row in rows:
        for peer in row.shown:
            beside = f", beside {peer.kind}" if peer else ""
            label = f"{row.case.model}, {row.case.precision}{beside}"
            ratios[label, row.case.work.name] = peer.ratio if peer else row.of_floor
    labels = [*dict.fromkeys(label for label, _ in ratios)]
    # With --only a model may lack cases that another has.
    bars = {
        work: [ratios.get((label, work), ABSENT) for label in labels]
        for work in dict.fromkeys(work for _, work in ratios)
    }
    below = "llama.cpp" if any(row.peers for row in rows) else "lower floor"
    grouped_bars(file, labels, bars, ylabel=f"tokens/s, Tandem / {below}")


def main(
    *,
    llama: Annotated[
        Path | None, typer.Option(help="Folder with llama.cpp's programs, or one of them.")
    ] = None,
    converter: Annotated[
        Path | None, typer.Option(help="convert_hf_to_gguf.py in llama.cpp's sources.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 3,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Cases with this in their names, as `granite bf16`; may be repeated."),
    ] = None,
    cpu: Annotated[
        str, typer.Option(help="Cores to run on, as `0,1`: each side has as many threads.")
    ] = "0",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Decode and prefill of the whole engine beside llama.cpp, and what the machine allows."""
    if (llama is None) != (converter is None):
        raise typer.BadParameter("--llama and --converter go together")
    cases = cases_of([QUICK_MODEL] if quick else [*LARGE], only or ())
    if not cases:
        raise typer.BadParameter(f"no case is called {' or '.join(only or ())}")
    if quick:
        rounds, cases = 1, [case for case in cases if case.work.phase == DECODE][:1]
    threads = len(cpu.split(","))
    found = report.Report("engine_vs_llama", out, SECONDS, cpu=cpu, quick=quick, threads=threads)
    try:
        peer = LlamaCpp(llama, converter, threads=threads) if llama and converter else None
        rows = run(cases, rounds, found, llama=peer)
    except LlamaCppError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    publish(rows, rounds, found)
    found.save(rows)


def publish(rows: Sequence[Row], rounds: int, found: report.Report) -> None:
    """The table and its plot."""
    note = (
        f"median of at most {rounds} rounds, tokens/s; {describe(found.host)}; stream floor: "
        "weights read once and states read and written once per step at the best bandwidth of "
        "the same rounds; GEMM floor: all parameters at the best rate of a large product in them"
    )
    table = [line for row in rows for line in lines(row)]
    found.publish("Engine and llama.cpp", headers=HEADERS, rows=table, note=note)
    plot(rows, found.plot())


if __name__ == "__main__":
    typer.run(main)
