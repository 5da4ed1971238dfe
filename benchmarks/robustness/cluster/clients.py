"""Clients that ask a cluster without a pause, and compare every answer with that of one node."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

STREAMS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 96, 48
GIVE_UP_S: Final = 60.0
PAUSE_S: Final = 0.2


@dataclass(slots=True, frozen=True)
class Asked:
    """One request: when it ended (monotonic), the longest silence in it, and how it ended."""

    at: float
    silence_s: float
    outcome: str


class Clients:
    """Asks without a pause, in a thread of its own, until closed; `asked` grows meanwhile.

    While `is_paused` no request begins.
    """

    def __init__(self, url: str, expected: Sequence[Sequence[int]]) -> None:
        self.asked: list[Asked] = []
        self._url, self._expected = url, expected
        self._is_over = False
        self.is_paused = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._thread.join(GIVE_UP_S)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=GIVE_UP_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._ask_on(session, it) for it in range(STREAMS)))

    async def _ask_on(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._is_over:
            if self.is_paused:
                await asyncio.sleep(PAUSE_S)
                continue
            number += STREAMS
            asked = await self._ask(session, number % len(self._expected))
            self.asked.append(asked)
            if asked.outcome == "failed":
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, session: aiohttp.ClientSession, which: int) -> Asked:
        expected = self._expected[which]
        tokens: list[int] = []
        last, silence_s = time.monotonic(), 0.0
        try:
            async for more in answer(session, self._url, which):
                silence_s, last = max(silence_s, time.monotonic() - last), time.monotonic()
                tokens += more
            outcome = "equal" if tokens == expected else "different"
        except (aiohttp.ClientError, TimeoutError, BrokenAnswerError):
            # An answer that broke off must at least be the beginning of one.
            outcome = "failed" if tokens == expected[: len(tokens)] else "different"
        now = time.monotonic()
        return Asked(now, max(silence_s, now - last), outcome)


class BrokenAnswerError(Exception):
    """A status other than 200, or an error inside a stream."""


async def answer(session: aiohttp.ClientSession, url: str, which: int) -> AsyncIterator[list[int]]:
    """Token ids of a streamed answer, piece by piece. Raises BrokenAnswerError."""
    body = {
        "model": "tandem-demo",
        "prompt": [20 + (7 * which + it) % 200 for it in range(PROMPT_TOKENS)],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise BrokenAnswerError
        async for line in reply.content:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: {"):
                yield _token_ids(line)
    raise BrokenAnswerError


def _token_ids(line: bytes) -> list[int]:
    event = msgspec.json.decode(line[6:])
    if "error" in event:
        raise BrokenAnswerError
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


async def expected_of(url: str) -> list[list[int]]:
    """The answers of one node, before anything happens to it."""
    async with aiohttp.ClientSession() as session:
        return [
            [token async for more in answer(session, url, which) for token in more]
            for which in range(PROMPTS)
        ]
