"""The time of a hand-over beside its bytes: from P's last output to D's first step.

Reads the times that two nodes noted; starts none.
"""

import asyncio
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Self

import msgspec

from benchmarks.hand_over.pd_pair import Pair, Prompt, blocking
from benchmarks.hand_over.stamped_node import Stamp
from benchmarks.support.models import random_prompts
from benchmarks.support.pairs import Spread, alternate

HAND_OVERS = 10
OUTPUT_TOKENS = 3
BUSY_REQUESTS = 4
BUSY_PROMPT_TOKENS = 64
BUSY_TOKENS = 3_000
PARTS = {
    "answer": "P's last output is made, until the client has it",
    "request": "the client has it, until D's admission looks at it",
    "admit": "admission: signature and other checks",
    "queue": "admitted, until an engine step has given it blocks",
    "plan": "until the first read begins: thread, plan",
    "bytes": "the reads, and D's digests of what they brought: not counted",
    "vouch": "P's record read, digests compared, until an engine step has heard of it",
    "step": "until that request's first step computes",
}


class HandOver(msgspec.Struct, frozen=True):
    """Milliseconds of one hand-over by part."""

    parts: dict[str, float]

    @property
    def control(self) -> float:
        """All parts but the one that touches the bytes."""
        return sum(self.parts.values()) - self.parts["bytes"]


class Moments:
    """Stamps of one hand-over by name."""

    def __init__(self, stamps: Iterable[Stamp]) -> None:
        self._stamps = sorted(stamps, key=lambda stamp: stamp.at)

    def first(self, name: str, after: float = 0.0) -> float:
        """When `name` happened first, not before `after`; RuntimeError when it did not."""
        for stamp in self._stamps:
            if stamp.name == name and stamp.at >= after:
                return stamp.at
        raise RuntimeError(f"a node did not note {name!r}")

    def all(self, name: str) -> list[float]:
        """Every time that `name` happened."""
        return [stamp.at for stamp in self._stamps if stamp.name == name]


def hand_over_of(answered: float, p: Moments, d: Moments) -> HandOver:
    """The parts of the one hand-over between these stamps; consecutive, so they add up."""
    began, checked, loaded = map(d.first, ("before_read", "before_confirm", "loaded"))
    moments = {
        "answer": (p.first("finished"), answered),
        "request": (answered, d.first("admit")),
        "admit": (d.first("admit"), d.first("admitted")),
        "queue": (d.first("admitted"), d.first("pull")),
        "plan": (d.first("pull"), began),
        "bytes": (began, checked),
        "vouch": (checked, loaded),
        "step": (loaded, d.first("execute", loaded)),
    }
    assert set(moments) == set(PARTS)
    parts = {name: 1e3 * (end - start) for name, (start, end) in moments.items()}
    return HandOver(parts)


class ControlRow(msgspec.Struct, frozen=True):
    """Hand-overs of one kind, ms: spread of the rounds' medians; medians of all by part."""

    case: str
    is_judged: bool
    control: Spread
    p99: float
    parts: dict[str, float]

    @classmethod
    def of(cls, case: str, rounds: Sequence[Sequence[HandOver]], *, is_judged: bool) -> Self:
        """Pools what the rounds gave."""
        medians = [statistics.median(one.control for one in found) for found in rounds]
        pooled = [hand_over for found in rounds for hand_over in found]
        ordered = sorted(hand_over.control for hand_over in pooled)
        return cls(
            case,
            is_judged,
            Spread.of(medians),
            ordered[round(0.99 * (len(ordered) - 1))],
            {name: statistics.median(one.parts[name] for one in pooled) for name in PARTS},
        )


async def idle(pair: Pair, prompt: Prompt) -> list[HandOver]:
    """HAND_OVERS, one after another, to a D that does nothing else."""
    pair.p.take()
    pair.d.take()
    return [await _hand_over(pair, prompt) for _ in range(HAND_OVERS)]


async def busy(pair: Pair, prompt: Prompt) -> list[HandOver]:
    """The same to a D that decodes others."""
    others = random_prompts(BUSY_REQUESTS, BUSY_PROMPT_TOKENS, seed=BUSY_REQUESTS)
    async with pair.decoding(others, BUSY_TOKENS):
        return await idle(pair, prompt)


async def _hand_over(pair: Pair, prompt: Prompt) -> HandOver:
    held = await pair.prefill(prompt, OUTPUT_TOKENS)
    await pair.pull(held)
    return hand_over_of(held.answered, Moments(pair.p.take()), Moments(pair.d.take()))


def measure_control(
    loop: asyncio.Runner,
    pairs: Mapping[str, Pair],
    tokens: int,
    *,
    rounds: int,
    until: float,
    done: Callable[[], None],
) -> list[ControlRow]:
    """Prompts of one length over every pair, idle and busy in turn."""
    (prompt,) = random_prompts(1, tokens, seed=tokens)
    ways = {
        (f"{name}, {tokens:,} tokens, D {call.__name__}"): blocking(
            loop, partial(call, one, prompt)
        )
        for name, one in pairs.items()
        for call in (idle, busy)
    }
    found = alternate(ways, rounds, until=until, done=done)
    return [
        ControlRow.of(case, results, is_judged=case.endswith("idle"))
        for case, results in found.items()
    ]
