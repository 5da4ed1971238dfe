"""`python -m benchmarks.onoff`: prefix caching on D with the per-request skip, without it, and off.

The table that vLLM #42524 never got. Four clusters of P, D and proxy on this machine serve the same
agent conversations by turns:

    skip        the product: attention that D has stays there, states come from P
    aligned     D's hit ends where D has states too: where an answer with its thought ended
    stateless   the same without states on D, as in vLLM before the skip: no hit at all
    off         no prefix caching, neither on P nor on D

All values but throughput are of the steps that go on from an earlier one. The command fails if a
cluster gives other tokens than the others, or if a step with the skip moves more than a state and
1.1 times the attention of its new tokens.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks import machine, report
from benchmarks.models import WIDE, save_random
from benchmarks.onoff.conversations import NAME, Client, Round, Shape
from benchmarks.pairs import Spread, alternate
from benchmarks.plots import grouped_bars
from benchmarks.processes import servers

SECONDS = (1800, 120)
ARENA_BYTES, QUICK_ARENA_BYTES = 1536 << 20, 128 << 20
SHAPE = Shape(shared=256, own=768, steps=2, added=480, thought=32, answered=32)
QUICK_SHAPE = Shape(shared=64, own=128, steps=2, added=128, thought=8, answered=8)
AT_ONCE, QUICK_AT_ONCE = (1, 4, 16), (2,)
SKIP, OFF = "skip", "off"
ALIGNED = ("aligned", "stateless")
ALIGNED_NODE = "benchmarks.onoff.aligned_node"
MOST_MOVED = 1.1
HEADERS = ("D's prefix caching", "TTFT ms", "TPOT ms", "tok/s", "tok/s of off", "D hit tokens",
           "MB moved", "of it states", "arena in use on D")  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """One cluster at one concurrency; spreads over rounds."""

    cluster: str
    at_once: int
    ttft_ms: Spread
    tpot_ms: Spread
    throughput: Spread
    ratio: Spread
    hit_tokens: float
    moved_mb: float
    state_mb: float
    used: Spread

    def cells(self) -> list[str]:
        """A line of the table."""
        return [
            f"{self.cluster}, {self.at_once} at once",
            self.ttft_ms.show(0),
            self.tpot_ms.show(1),
            self.throughput.show(0),
            self.ratio.show(),
            f"{self.hit_tokens:,.0f}",
            f"{self.moved_mb:.2f}",
            f"{self.state_mb:.2f}",
            self.used.show(3),
        ]


def rows_of(at_once: int, rounds: Mapping[str, Sequence[Round]]) -> list[Row]:
    """A row per cluster; the ratio is to the cluster without caching, by round."""
    off = [one.throughput for one in rounds[OFF]]
    return [
        Row(
            name,
            at_once,
            Spread.of([1e3 * one.mean("ttft") for one in own]),
            Spread.of([1e3 * one.mean("tpot") for one in own]),
            Spread.of([one.throughput for one in own]),
            Spread.of_ratio([one.throughput for one in own], off),
            Spread.of([one.mean("hit") for one in own]).median,
            Spread.of([_moved(one) for one in own]).median / 1e6,
            Spread.of([one.mean("state_bytes") for one in own]).median / 1e6,
            Spread.of([one.used for one in own]),
        )
        for name, own in rounds.items()
    ]


def check(rounds: Mapping[str, Sequence[Round]]) -> None:
    """Raises RuntimeError if tokens differ, or if a step with the skip moved too much."""
    for name, own in rounds.items():
        for one, other in zip(own, rounds[OFF], strict=True):
            if [step.tokens for step in one.steps] != [step.tokens for step in other.steps]:
                raise RuntimeError(f"{name} and {OFF} gave different tokens")
    for one in rounds[SKIP]:
        first = next(step for step in one.steps if step.prompt == step.new)
        # D may hold the shared beginning already: a conversation beside this one brought it.
        per_token = first.attention_bytes / (first.prompt - first.hit)
        for step in one.later():
            most = MOST_MOVED * step.new * per_token
            if step.attention_bytes > most:
                raise RuntimeError(
                    f"a step of {step.new} new tokens moved {step.attention_bytes} bytes of "
                    f"attention, at most {most:.0f} are needed"
                )
            if step.state_bytes > first.state_bytes:
                raise RuntimeError(
                    f"a step moved {step.state_bytes} bytes of states, one is {first.state_bytes}"
                )


@contextmanager
def clusters(
    model: Path, shape: Shape, arena_bytes: int, *, aligned: Sequence[str]
) -> Iterator[dict[str, Client]]:
    """All clusters, started one after the other; a client of each."""
    flags = (str(model), "--port", "0", "--served-model-name", NAME, "--dtype", "float32",
             "--kv-cache-memory-bytes", str(arena_bytes))  # fmt: skip
    nodes: dict[str, list[tuple[str, ...]]] = {
        SKIP: [("prefill_node", *flags), ("decode_node", *flags)]
    }
    for name in aligned:
        nodes[name] = [("prefill_node", *flags), (ALIGNED_NODE, name, *flags)]
    nodes[OFF] = [(*command, "--no-enable-prefix-caching") for command in nodes[SKIP]]
    made = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, commands in nodes.items():
            p, d = stack.enter_context(servers(folder, *commands))
            proxy = ("proxy", "--prefill", p, "--decode", d, "--port", "0",
                     "--enable-prompt-tokens-details")  # fmt: skip
            (front,) = stack.enter_context(servers(folder, proxy))
            made[name] = Client(front, d, shape)
        yield made


def run(found: report.Report, rounds: int, *, quick: bool) -> list[Row]:
    """Every concurrency, all clusters by turns."""
    rows: list[Row] = []
    concurrency = QUICK_AT_ONCE if quick else AT_ONCE
    aligned = ALIGNED[:1] if quick else ALIGNED
    total = len(concurrency) * (2 + len(aligned)) * (1 + rounds)
    with ExitStack() as stack:
        describe = stack.enter_context(report.progress(found.console, total))
        describe("starting the clusters")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = save_random(WIDE, folder)
        loop = stack.enter_context(asyncio.Runner())
        size = (QUICK_SHAPE, QUICK_ARENA_BYTES) if quick else (SHAPE, ARENA_BYTES)
        asked = stack.enter_context(clusters(model, *size, aligned=aligned))
        for number, at_once in enumerate(concurrency):
            ways = {name: _blocking(loop, client, at_once) for name, client in asked.items()}
            until, done = found.share(len(concurrency) - number), describe(f"{at_once} at once")
            taken = alternate(ways, rounds, until=until, done=done)
            check(taken)
            rows += rows_of(at_once, taken)
    return rows


def draw(file: Path, rows: Sequence[Row]) -> None:
    """TTFT of later steps by concurrency."""
    labels = list(dict.fromkeys(f"{row.at_once} at once" for row in rows))
    bars: dict[str, list[Spread]] = {}
    for row in rows:
        bars.setdefault(row.cluster, []).append(row.ttft_ms)
    grouped_bars(file, labels, bars, ylabel="TTFT of later steps, ms")


def _blocking(loop: asyncio.Runner, client: Client, at_once: int) -> Callable[[], Round]:
    return lambda: loop.run(client.round(at_once))


def _moved(one: Round) -> float:
    return one.mean("attention_bytes") + one.mean("state_bytes")


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one.")] = 5,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """D's prefix caching with the per-request skip of #42524, without it, and off."""
    found = report.Report("onoff", out, SECONDS, cpu="all", quick=quick)
    rounds = 1 if quick else rounds
    rows = run(found, rounds, quick=quick)
    shape = QUICK_SHAPE if quick else SHAPE
    note = (
        f"conversations of {shape.shared} shared and {shape.own} own tokens, {shape.steps} steps, "
        f"{shape.thought} tokens of thought, {shape.answered} of answer and {shape.added} new "
        "ones each; equal tokens everywhere; "
        f"at most {rounds} rounds; {machine.describe(found.host)}"
    )
    found.publish("ON/OFF", headers=HEADERS, rows=[row.cells() for row in rows], note=note)
    draw(found.plot(), rows)
    found.save({"shape": shape, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
