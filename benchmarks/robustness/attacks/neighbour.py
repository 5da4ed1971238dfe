"""A well-behaved client beside the attack: the rate of its stream, the latency of its requests."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Final

import msgspec

from benchmarks.load.client import Client
from benchmarks.load.request import GREEDY, Request
from benchmarks.support.cluster import NAME

STREAM_TOKENS: Final = 200
PAUSE_S: Final = 0.25
REQUEST_S: Final = 60.0


class Seen(msgspec.Struct, frozen=True):
    """Tokens per second of one stream; seconds of requests without and with a new grammar.

    `errors`: answers other than 200.
    """

    tokens_per_s: float
    plain_s: list[float]
    grammar_s: list[float]
    errors: list[str]

    @property
    def plain(self) -> float:
        return median(self.plain_s or [REQUEST_S])

    @property
    def grammar(self) -> float:
        return median(self.grammar_s or [REQUEST_S])


async def observe(url: str, key: str, seconds: float) -> Seen:
    """Measures as the client for `seconds`; requests under way then are waited for."""
    numbers, end = itertools.count(), time.monotonic() + seconds
    errors: list[str] = []
    async with Client(url, NAME, api_key=key, timeout_s=REQUEST_S) as client:
        plain_s, grammar_s, rate = await asyncio.gather(
            _often(client, _plain, numbers, end=end, errors=errors),
            _often(client, _with_grammar, numbers, end=end, errors=errors),
            _streams(client, numbers, end),
        )
    return Seen(rate, plain_s, grammar_s, errors)


def _plain(number: int) -> Request:
    return Request(prompt=f"Question {number}", max_tokens=4, sampling={"temperature": 0})


def _with_grammar(number: int) -> Request:
    schema = {
        "type": "object",
        "properties": {f"n{number}": {"enum": ["a", "b"]}},
        "required": [f"n{number}"],
        "additionalProperties": False,
    }
    sampling = {"temperature": 0, "structured_outputs": {"json": schema}}
    return msgspec.structs.replace(_plain(number), max_tokens=12, sampling=sampling)


async def _often(
    client: Client,
    made: Callable[[int], Request],
    numbers: Iterator[int],
    *,
    end: float,
    errors: list[str],
) -> list[float]:
    taken = []
    while time.monotonic() < end:
        reply = await client.send(made(next(numbers)))
        errors += [reply.error] if reply.error else []
        taken.append(reply.ended - reply.sent)
        await asyncio.sleep(PAUSE_S)
    return taken


async def _streams(client: Client, numbers: Iterator[int], end: float) -> float:
    """Tokens per second, from first to last token of one answer after the other."""
    num_tokens, seconds = 0, 0.0
    while time.monotonic() < end:
        request = _plain(next(numbers))
        request = msgspec.structs.replace(request, max_tokens=STREAM_TOKENS, sampling=GREEDY)
        chunks = (await client.send(request)).chunks
        num_tokens += max(0, len(chunks) - 1)
        seconds += chunks[-1] - chunks[0] if chunks else 0.0
    return num_tokens / seconds if seconds else 0.0
