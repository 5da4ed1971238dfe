"""Whether D decodes while it pulls: the same steps and pulls apart and at the same time.

Reads the times that D noted. A window goes from the begin of the first pull to the end of the last;
pulls run one after another without a pause, so that decode steps meet one all the time.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Self

import msgspec

from benchmarks.hand_over.control_cost import Moments
from benchmarks.hand_over.pd_pair import Pair, Prefilled, Prompt, blocking
from benchmarks.models import random_prompts
from benchmarks.pairs import Spread, alternate

RUNNING = 8
RUNNING_PROMPT_TOKENS = 64
RUNNING_TOKENS = 3_000
PULLED_TOKENS = 2  # the first one comes from P; with that alone D would pull nothing
DECODE_S = 1.0
ALONE, PULLS, BOTH = "decode", "pulls", "both"


class Window(msgspec.Struct, frozen=True):
    """Seconds in all, of every decode step inside, and how many pulls of what size ran in it."""

    seconds: float
    steps: tuple[float, ...]
    pulls: int = 0
    pulled_bytes: int = 0

    @classmethod
    def of(cls, moments: Moments, start: float, end: float) -> Self:
        """Steps by their ends, both inside the window."""
        ends = [at for at in moments.all("executed") if start <= at <= end]
        steps = tuple(later - earlier for earlier, later in pairwise(ends))
        return cls(end - start, steps)

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @property
    def pull_s(self) -> float:
        """The mean pull."""
        return self.seconds / self.pulls


class Overlap(msgspec.Struct, frozen=True):
    """One transport: milliseconds apart and together, and how much together saves.

    `serial_ratio`: what the steps and pulls of a window would have taken one after the other, by
    what they took: 1 is strictly serial, 2 the most that two at once can give.
    """

    transport: str
    pulled_bytes: int
    step_alone: Spread
    step_ratio: Spread
    slowest_ratio: Spread
    pull_alone: Spread
    pull_ratio: Spread
    serial_ratio: Spread


async def decode_window(pair: Pair) -> Window:
    """Decode steps with no pull near."""
    async with pair.decoding(_running(), RUNNING_TOKENS):
        pair.d.take()
        await asyncio.sleep(DECODE_S)
        moments = Moments(pair.d.take())
    ends = moments.all("executed")
    return Window.of(moments, ends[0], ends[-1])


async def pulls_window(pair: Pair, prompt: Prompt, pulls: int) -> Window:
    """Pulls while D decodes nothing but what it pulled: one token each."""
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
    pair.d.take()
    outputs = await asyncio.gather(*(pair.pull(one) for one in held))
    moments = Moments(pair.d.take())
    window = Window.of(moments, moments.first("before_read"), moments.all("before_confirm")[-1])
    stats = [output.kv_transfer for output in outputs if output.kv_transfer is not None]
    pulled_bytes = stats[0].attention_bytes + stats[0].state_bytes
    return msgspec.structs.replace(window, pulls=len(stats), pulled_bytes=pulled_bytes)


def _running() -> list[list[int]]:
    return random_prompts(RUNNING, RUNNING_PROMPT_TOKENS, seed=RUNNING)


def measure_overlap(
    loop: asyncio.Runner,
    transport: str,
    pair: Pair,
    *,
    tokens: int,
    pulls: int,
    rounds: int,
    done: Callable[[], None],
) -> Overlap:
    """Prompts of one length, over one pair, in alternating rounds."""
    (prompt,) = random_prompts(1, tokens, seed=tokens)
    ways = {
        ALONE: blocking(loop, partial(decode_window, pair)),
        PULLS: blocking(loop, partial(pulls_window, pair, prompt, pulls)),
        BOTH: blocking(loop, partial(both_window, pair, prompt, pulls)),
    }
    return overlap_of(transport, alternate(ways, rounds, done=done))


def overlap_of(transport: str, rounds: Mapping[str, Sequence[Window]]) -> Overlap:
    """Ratios by round."""
    decode, pulls, both = rounds[ALONE], rounds[PULLS], rounds[BOTH]
    trios = list(zip(decode, pulls, both, strict=True))
    serial = [len(b.steps) * d.step_s + b.pulls * p.pull_s for d, p, b in trios]
    return Overlap(
        transport,
        pulls[0].pulled_bytes,
        Spread.of([1e3 * one.step_s for one in decode]),
        Spread.of_ratio([b.step_s for b in both], [d.step_s for d in decode]),
        Spread.of_ratio([max(b.steps) for b in both], [max(d.steps) for d in decode]),
        Spread.of([1e3 * one.pull_s for one in pulls]),
        Spread.of_ratio([b.pull_s for b in both], [p.pull_s for p in pulls]),
        Spread.of_ratio(serial, [b.seconds for b in both]),
    )
