"""A well-behaved client beside the attack: the rate of its stream, the latency of its requests."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final

import aiohttp
import msgspec

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
    """What the client sees for `seconds`; requests under way then are waited for."""
    numbers, end = itertools.count(), time.monotonic() + seconds
    errors: list[str] = []
    tokens = [0, 0.0]
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
        plain_s, grammar_s, _ = await asyncio.gather(
            _often(session, _plain, numbers, end=end, errors=errors),
            _often(session, _with_grammar, numbers, end=end, errors=errors),
            _streams(session, numbers, end, tokens=tokens),
        )
    rate = tokens[0] / tokens[1] if tokens[1] else 0.0
    return Seen(rate, plain_s, grammar_s, errors)


def _plain(number: int) -> dict[str, Any]:
    return {"model": "bench", "prompt": f"Question {number}", "max_tokens": 4, "temperature": 0}


def _with_grammar(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"n{number}": {"enum": ["a", "b"]}},
              "required": [f"n{number}"], "additionalProperties": False}  # fmt: skip
    return {**_plain(number), "max_tokens": 12, "structured_outputs": {"json": schema}}


async def _often(
    session: aiohttp.ClientSession,
    body: Callable[[int], dict[str, Any]],
    numbers: Iterator[int],
    *,
    end: float,
    errors: list[str],
) -> list[float]:
    taken = []
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            async with session.post("/v1/completions", json=body(next(numbers))) as reply:
                said = f"{reply.status}: {(await reply.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            said = repr(error)
        errors += [] if said.startswith("200") else [said]
        taken.append(time.monotonic() - began)
        await asyncio.sleep(PAUSE_S)
    return taken


async def _streams(
    session: aiohttp.ClientSession, numbers: Iterator[int], end: float, *, tokens: list[float]
) -> None:
    """One answer after the other; counts tokens, and seconds from first to last token of each."""
    while time.monotonic() < end:
        body = {**_plain(next(numbers)), "max_tokens": STREAM_TOKENS, "stream": True,
                "ignore_eos": True}  # fmt: skip
        async with session.post("/v1/completions", json=body) as reply:
            times = [
                time.monotonic() async for line in reply.content if line.startswith(b"data: {")
            ]
        if times:
            tokens[0] += len(times) - 1
            tokens[1] += times[-1] - times[0]
