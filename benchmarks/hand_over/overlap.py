"""Decoding while pulling: the same steps and pulls, apart and at the same time.

Reads the times that D noted. A prompt is pulled when the one before has been decoded and is gone:
only steps that end while it is read count, in which D computes for others.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import msgspec

from benchmarks.hand_over.control_cost import Moments
from benchmarks.hand_over.pd_pair import Pair, Prefilled, Prompt, blocking
from benchmarks.support.models import random_prompts
from benchmarks.support.pairs import Spread, alternate

RUNNING = 8
RUNNING_PROMPT_TOKENS = 64
RUNNING_TOKENS = 3_000
PULLED_TOKENS = 2  # the first one comes from P; with that alone D would pull nothing
DECODE_S = 1.0
ALONE, PULLS, BOTH = "decode", "pulls", "both"


class Window(msgspec.Struct, frozen=True):
    """Seconds of every decode step and of every read, and the bytes of one read.

    There may be no step: a short read on a busy machine can end before the step beside it does.
    """

    steps: tuple[float, ...]
    reads: tuple[float, ...] = ()
    pulled_bytes: int = 0

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @property
    def pull_s(self) -> float:
        """The median read."""
        return statistics.median(self.reads)


class Overlap(msgspec.Struct, frozen=True):
    """One transport: milliseconds apart and together, and how much together saves.

    `serial_ratio`: what a read and the steps beside it would have taken one after the other, by
    what they took: 1 is strictly serial, 2 the most that two at once can give. `overlapped`: in
    how many of the rounds a step ended beside a read; ratios with steps are of these, or None.
    """

    transport: str
    pulled_bytes: int
    step_alone: Spread
    step_ratio: Spread | None
    slowest_ratio: Spread | None
    pull_alone: Spread
    pull_ratio: Spread
    serial_ratio: Spread | None
    overlapped: int


async def decode_window(pair: Pair) -> Window:
    """Decode steps with no pull near."""
    async with pair.decoding(_running(), RUNNING_TOKENS):
        pair.d.take()
        await asyncio.sleep(DECODE_S)
        moments = Moments(pair.d.take())
    return Window(_steps(moments, 0.0, math.inf))


async def pulls_window(pair: Pair, prompt: Prompt, pulls: int) -> Window:
    """Pulls while D decodes nothing."""
    held = await _hold(pair, prompt, pulls)
    return await _pull_all(pair, held)


async def both_window(pair: Pair, prompt: Prompt, pulls: int) -> Window:
    """Pulls while D decodes."""
    held = await _hold(pair, prompt, pulls)
    async with pair.decoding(_running(), RUNNING_TOKENS):
        return await _pull_all(pair, held)


async def _hold(pair: Pair, prompt: Prompt, pulls: int) -> list[Prefilled]:
    """P computes the prompt once and holds it under that many leases."""
    return [await pair.prefill(prompt, PULLED_TOKENS) for _ in range(pulls)]


async def _pull_all(pair: Pair, held: Sequence[Prefilled]) -> Window:
    steps: list[float] = []
    reads: list[float] = []
    for one in held:
        pair.d.take()
        output = await pair.pull(one)
        moments = Moments(pair.d.take())
        start, end = moments.first("before_read"), moments.all("before_confirm")[-1]
        steps += _steps(moments, start, end)
        reads.append(end - start)
    assert output.kv_transfer is not None
    pulled_bytes = output.kv_transfer.attention_bytes + output.kv_transfer.state_bytes
    return Window(tuple(steps), tuple(reads), pulled_bytes)


def _steps(moments: Moments, start: float, end: float) -> tuple[float, ...]:
    """Seconds of each decode step that ends between `start` and `end`."""
    steps = pairwise(moments.all("executed"))
    return tuple(later - earlier for earlier, later in steps if start <= later <= end)


def _running() -> list[list[int]]:
    return random_prompts(RUNNING, RUNNING_PROMPT_TOKENS, seed=RUNNING)


def measure_overlap(
    loop: asyncio.Runner,
    transport: str,
    pair: Pair,
    *,
    tokens: int,
    pulls: int,
    times: tuple[int, float],
    done: Callable[[], None],
) -> Overlap:
    """Prompts of one length, over one pair; `times`: rounds, and until when (monotonic)."""
    (prompt,) = random_prompts(1, tokens, seed=tokens)
    ways = {
        ALONE: blocking(loop, partial(decode_window, pair)),
        PULLS: blocking(loop, partial(pulls_window, pair, prompt, pulls)),
        BOTH: blocking(loop, partial(both_window, pair, prompt, pulls)),
    }
    rounds, until = times
    return overlap_of(transport, alternate(ways, rounds, until=until, done=done))


def overlap_of(transport: str, rounds: Mapping[str, Sequence[Window]]) -> Overlap:
    """Ratios by round; those with steps of the rounds in which one ended beside a read."""
    decode, pulls, both = rounds[ALONE], rounds[PULLS], rounds[BOTH]
    trios = [trio for trio in zip(decode, pulls, both, strict=True) if trio[2].steps]
    return Overlap(
        transport,
        pulls[0].pulled_bytes,
        Spread.of([1e3 * one.step_s for one in decode]),
        _spread([b.step_s / d.step_s for d, _, b in trios]),
        _spread([max(b.steps) / max(d.steps) for d, _, b in trios]),
        Spread.of([1e3 * one.pull_s for one in pulls]),
        Spread.of_ratio([b.pull_s for b in both], [p.pull_s for p in pulls]),
        _spread([p.pull_s / b.pull_s + d.step_s / b.step_s for d, p, b in trios]),
        len(trios),
    )


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread.of(values) if values else None
