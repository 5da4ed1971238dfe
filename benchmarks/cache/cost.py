"""`python -m benchmarks.cache cost`: what the KV cache's bookkeeping takes per request.

One request after another, ids only: prompts that share 7/8 of their tokens, 16-token blocks, chunks
of 512, one full-attention and three Mamba groups of equally many layers (Qwen3.5-4B as vLLM splits
it). Counted per request, in microseconds:

- hash: digests of all hash blocks of the prompt.
- lookup: the longest joint hit.
- allocate + cache: start from the hit, then per chunk room, checkpoints and publication.
- free: keep the end state, give everything back.

`with room`: the arena never has to evict. `full`: it holds two prompts, so every request evicts as
much as it takes. vLLM 0.32's figures are from another run, on such a machine; a plain chain of
SHA-256 over the same blocks took about 250 microseconds there, and is measured here as well.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated

import msgspec
import typer

from benchmarks.cache.geometries import BLOCK_SIZE, GEOMETRIES, Geometry
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import curves
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.checkpoints import due
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import KVCacheGroup

SECONDS = (120, 30)
QUICK_ROUNDS = 20
CHUNK = 512
LENGTHS = (1024, 2048, 8192, 32_768, 131_072)
REFERENCE_LENGTH = 8192
NUM_KEPT = 4  # states that one request keeps, at most
FULL = "full"
ARENAS = ("with room", FULL)
PHASES = ("hash", "lookup", "allocate + cache", "free")
VLLM = (752.0, 245.0, 224.0, 57.0)
MOST_OF_VLLM = 1 / 3
HEADERS = ("case", "SHA-256 chain", *PHASES)
VERDICT_HEADERS = ("case", "vLLM 0.32", "Tandem", "of vLLM's", "at most a third")


class Cost(msgspec.Struct, frozen=True):
    """Microseconds per request; `chain`: a plain SHA-256 chain over the same blocks."""

    num_tokens: int
    arena: str
    chain: Spread
    phases: tuple[Spread, ...]

    @property
    def case(self) -> str:
        """`8,192 tokens, with room`."""
        return f"{self.num_tokens:,} tokens, {self.arena}"


def plan_of(geometry: Geometry, num_units: int) -> ArenaPlan:
    """One full-attention and three Mamba groups of equally many layers."""
    step = geometry.num_attention
    states = (range(start, start + step) for start in range(0, geometry.num_states, step))
    first = geometry.num_states
    groups = (
        *(KVCacheGroup(geometry.state, tuple(layers)) for layers in states),
        KVCacheGroup(geometry.attention, tuple(range(first, first + step))),
    )
    unit_bytes = plan_arena(groups, BLOCK_SIZE, 1 << 40).unit_bytes
    return plan_arena(groups, BLOCK_SIZE, num_units * unit_bytes)


class Node:
    """One cache and the clock readings of its requests."""

    def __init__(self, plan: ArenaPlan) -> None:
        self.cache = KVCacheManager(plan)
        self.readings: list[tuple[float, ...]] = []

    def serve(self, token_ids: list[int]) -> None:
        """One prompt from arrival to its end, as the scheduler does it."""
        clock = [perf_counter()]
        prefix = PrefixDigests(self.cache.hasher, token_ids, None)
        prefix.boundaries()
        clock.append(perf_counter())
        hit = self.cache.find_hit(prefix, len(token_ids) - 1)
        clock.append(perf_counter())
        tables = self.cache.start(hit, min(hit.num_tokens + CHUNK, len(token_ids)))
        assert tables is not None, "the arena is too small"
        self.cache.plan_checkpoints(tables, hit, len(token_ids))
        for start in range(hit.num_tokens, len(token_ids), CHUNK):
            end = min(start + CHUNK, len(token_ids))
            self.cache.grow(tables, end)
            kept = self.cache.reserve_checkpoints(prefix, due(tables.checkpoints, start, end))
            self.cache.states.take_new()
            self.cache.copies_done()
            self.cache.publish(tables, prefix, end)
            self.cache.publish_checkpoints(tables, kept)
        clock.append(perf_counter())
        self.cache.retire(tables, prefix, len(token_ids))
        self.cache.free(tables)
        clock.append(perf_counter())
        self.readings.append(tuple(end - start for start, end in pairwise(clock)))


def chain(token_ids: list[int]) -> None:
    """The yardstick: each block's digest over the one before it and the block's tokens."""
    data, size = array("I", token_ids).tobytes(), 4 * BLOCK_SIZE
    digest = bytes(32)
    for start in range(0, len(data), size):
        digest = sha256(digest + data[start : start + size]).digest()


def measure(num_tokens: int, arena: str, rounds: int) -> Cost:
    """Medians over `rounds` requests; a tenth more come first and do not count."""
    geometry, rng = GEOMETRIES["Qwen3.5-4B"], Random(num_tokens)
    units = plan_of(geometry, 2).units_for
    own = units(num_tokens // 8 + CHUNK) + NUM_KEPT * (len(plan_of(geometry, 2).groups) - 1)
    room = units(num_tokens) + 2 * rounds * own
    node = Node(plan_of(geometry, 2 * units(num_tokens) if arena == FULL else room))
    shared = [rng.randrange(150_000) for _ in range(num_tokens * 7 // 8)]
    chains = []
    for _ in range(rounds + rounds // 10 + 2):
        token_ids = shared + [rng.randrange(150_000) for _ in range(num_tokens - len(shared))]
        started = perf_counter()
        chain(token_ids)
        chains.append(perf_counter() - started)
        node.serve(token_ids)
    columns = zip(*node.readings[-rounds:], strict=True)
    return Cost(num_tokens, arena, _micros(chains[-rounds:]), tuple(map(_micros, columns)))


def _micros(seconds: Sequence[float]) -> Spread:
    return Spread.of([1e6 * value for value in seconds])


def cells(cost: Cost) -> list[str]:
    """One line of the table of costs."""
    return [cost.case, *(f"{spread.median:,.0f}" for spread in (cost.chain, *cost.phases))]


def verdicts(cost: Cost) -> list[list[str]]:
    """The phases of one cost beside vLLM's."""
    lines = []
    for phase, theirs, ours in zip(PHASES, VLLM, cost.phases, strict=True):
        share = ours.median / theirs
        verdict = "met" if share <= MOST_OF_VLLM else "no"
        name = f"{phase}, {cost.case}"
        lines.append([name, f"{theirs:.0f}", ours.show(0), f"{share:.2f}", verdict])
    return lines


def main(
    *,
    rounds: Annotated[int, typer.Option(min=5, help="Requests per row.")] = 200,
    cpu: Annotated[str, typer.Option(help="Core to run on, or `all`.")] = "0",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Microseconds per request for hash, lookup, allocate + cache and free."""
    found = report.Report("kv_cache_cost", out, SECONDS, cpu=cpu, quick=quick)
    rounds = QUICK_ROUNDS if quick else rounds
    cases = [(length, arena) for arena in ARENAS for length in LENGTHS]
    costs = []
    with report.progress(found.console, len(cases)) as describe:
        for length, arena in cases:
            done = describe(f"{length:,} tokens, {arena}")
            costs.append(measure(length, arena, max(5, min(rounds, rounds * 8192 // length))))
            done()
    publish(found, costs, note=machine.describe(found.host))
    draw(found.plot(), costs)
    found.save(costs)


def publish(found: report.Report, costs: Sequence[Cost], *, note: str) -> None:
    """Both tables."""
    reference = [cost for cost in costs if cost.num_tokens == REFERENCE_LENGTH]
    lines = [line for cost in reference for line in verdicts(cost)]
    title = "Bookkeeping per request, microseconds"
    found.publish(title, headers=HEADERS, rows=list(map(cells, costs)), note=note)
    found.publish(f"{title}, beside vLLM", headers=VERDICT_HEADERS, rows=lines, note=note)


def draw(file: Path, costs: Sequence[Cost]) -> None:
    """Microseconds over prompt length, one panel per state of the arena, one line per phase."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cost in costs:
        lines = panels.setdefault(cost.arena, {})
        for phase, spread in zip(PHASES, cost.phases, strict=True):
            lines.setdefault(phase, []).append((cost.num_tokens, spread.median))
    curves(file, panels, xlabel="tokens of the prompt", ylabel="microseconds", log_y=True)
