"""How many of the ideal's hits do prefill workers have under each way of routing?

Conversations of groups, each group with a prompt of its own before all of its conversations; each
turn has the one before and some new tokens. The ideal is one cache without an end that all prefill
workers share, in whole blocks.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.load.request import Request
from benchmarks.serving.vllm_workers.asking import Ids, answers, request_of, some_ids
from benchmarks.serving.vllm_workers.fronts import Front
from benchmarks.support.vllm_peer import BLOCK, Workers

HEADERS = (
    *("through", "at once", "requests", "hits, tokens", "ideal", "of the ideal", "by worker"),
    *("failed", "s"),
)
HITS = "vllm:prefix_cache_hits_total"
OUTPUT = 4
# Until events of the groups' prompts have come.
SETTLE_S = 2.0


class Shape(msgspec.Struct, frozen=True):
    """Groups of conversations; lengths in tokens."""

    groups: int = 4
    conversations: int = 4
    turns: int = 4
    shared: int = 512
    turn: int = 160


class Row(msgspec.Struct, frozen=True):
    """One way of routing; tokens, as vLLM's prefill workers count them."""

    through: str
    at_once: int
    requests: int
    hits: tuple[int, ...]
    ideal: int
    errors: tuple[str, ...]
    seconds: float

    @property
    def share(self) -> float:
        """Of the ideal's hits."""
        return sum(self.hits) / self.ideal


async def measure(
    front: Front, up: Workers, at_once: int, *, tell: Callable[[str], None], seed: int
) -> Row:
    """Prompts of `seed` are in no cache yet; groups' prompts come first, one by one."""
    first, rest = load(Shape(), seed)
    before = _hits(up)
    tell(f"{front.name}, {at_once} at once")
    began = time.perf_counter()
    replies = await answers(front.url, first, at_once=1)
    await asyncio.sleep(SETTLE_S)
    replies += await answers(front.url, rest, at_once=at_once)
    seconds = time.perf_counter() - began
    hits = tuple(after - early for early, after in zip(before, _hits(up), strict=True))
    return Row(
        through=front.name,
        at_once=at_once,
        requests=len(replies),
        hits=hits,
        ideal=ideal_hits(first) + ideal_hits(rest, first),
        errors=tuple(one.error for one in replies if one.error),
        seconds=seconds,
    )


def load(shape: Shape, seed: int) -> tuple[list[Request], list[Request]]:
    """The groups' own prompts, and all turns; turns of one conversation follow each other."""
    draw = random.Random(seed)
    groups = [some_ids(draw, shape.shared) for _ in range(shape.groups)]
    turns: list[Request] = []
    for number in range(shape.groups * shape.conversations):
        prompt = groups[number % shape.groups]
        for _ in range(shape.turns):
            prompt = (*prompt, *some_ids(draw, shape.turn))
            turns.append(request_of(prompt, OUTPUT, session=f"{number}"))
    return [request_of((*one, *some_ids(draw, 1)), OUTPUT) for one in groups], turns


def ideal_hits(requests: Sequence[Request], known: Sequence[Request] = ()) -> int:
    """Tokens that one cache without an end has, of whole blocks; never a prompt's last token."""
    blocks: set[Ids] = set()
    for one in known:
        blocks.update(_prefixes(one))
    hits = 0
    for one in requests:
        own = _prefixes(one)
        usable = [prefix for prefix in own if len(prefix) < len(one.prompt)]
        hits += max((len(prefix) for prefix in usable if prefix in blocks), default=0)
        blocks.update(own)
    return hits


def _prefixes(request: Request) -> list[Ids]:
    ids = request.prompt
    assert isinstance(ids, tuple)
    return [ids[:end] for end in range(BLOCK, len(ids) + 1, BLOCK)]


def _hits(up: Workers) -> list[int]:
    return [int(one.samples().get(HITS, 0)) for one in up.prefill]


def cells(row: Row) -> list[str]:
    """One line of the table."""
    by_worker = " + ".join(map(str, row.hits))
    counts = (row.at_once, row.requests, sum(row.hits), row.ideal)
    last = (f"{row.share:.3f}", by_worker, str(len(row.errors)), f"{row.seconds:.0f}")
    return [row.through, *map(str, counts), *last]
