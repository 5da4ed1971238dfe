"""Agent steps through a proxy: a step's prompt is the one before, its answer, and new tokens.

Of each answer the first tokens are a thought, which later prompts leave out, as the chat templates
of reasoning models do: no later prompt begins with all that D has computed. The client sends token
ids and streams greedy tokens of fixed number, so that all clusters get the same prompts as long as
they give the same answers.
"""

import asyncio
import random
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.models import SHARED

NAME = "bench"
REQUEST_TIMEOUT_S = 300.0
POLL_S = 0.2
DATA, DONE = b"data: ", b"data: [DONE]"


class Shape(msgspec.Struct, frozen=True):
    """Tokens: shared by all conversations, a conversation's own, and of each step."""

    shared: int
    own: int
    steps: int
    added: int
    thought: int
    answered: int


class Step(msgspec.Struct, frozen=True):
    """One request. Seconds; bytes that D pulled; tokens that it had; `new`: tokens it had never."""

    ttft: float
    tpot: float
    prompt: int
    new: int
    tokens: tuple[int, ...]
    attention_bytes: int
    state_bytes: int
    hit: int


class Round(msgspec.Struct, frozen=True):
    """All steps of one round in order of conversation; seconds; the most units in use on D."""

    steps: tuple[Step, ...]
    seconds: float
    used: float

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(len(step.tokens) for step in self.steps) / self.seconds

    def later(self) -> list[Step]:
        """The steps that go on from an earlier one: those that a cache can help."""
        return [step for step in self.steps if step.prompt > step.new]

    def mean(self, value: str) -> float:
        """Mean of one field over the later steps."""
        return float(statistics.mean(getattr(step, value) for step in self.later()))


class Client:
    """Talks to one cluster; every round has other prompts, by its number."""

    def __init__(self, proxy: str, decode: str, shape: Shape) -> None:
        self._proxy = proxy
        self._decode = decode
        self._shape = shape
        self._rounds = 0

    async def round(self, at_once: int) -> Round:
        """`at_once` conversations from start to end, side by side."""
        self._rounds += 1
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        draw = random.Random(self._rounds)
        shared = list(_tokens(draw, self._shape.shared))
        starts = [(*shared, *_tokens(draw, self._shape.own)) for _ in range(at_once)]
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http:
            usage = asyncio.create_task(self._most_used(http))
            started = perf_counter()
            try:
                talks = await asyncio.gather(*(self._talk(http, start) for start in starts))
            finally:
                seconds = perf_counter() - started
                usage.cancel()
                (used,) = await asyncio.gather(usage, return_exceptions=False)
        return Round(tuple(step for talk in talks for step in talk), seconds, used)

    async def _talk(self, http: aiohttp.ClientSession, prompt: tuple[int, ...]) -> list[Step]:
        draw, steps, new = random.Random(prompt[-1]), [], len(prompt)
        for _ in range(self._shape.steps):
            steps.append(await self._ask(http, prompt, new))
            kept = steps[-1].tokens[self._shape.thought :]
            added = (*kept, *_tokens(draw, self._shape.added))
            prompt, new = (*prompt, *added), len(added)
        return steps

    async def _ask(self, http: aiohttp.ClientSession, prompt: tuple[int, ...], new: int) -> Step:
        num_tokens = self._shape.thought + self._shape.answered
        body = {
            "model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        tokens: list[int] = []
        times = [perf_counter()]
        usage: dict[str, Any] = {}
        async with http.post(f"{self._proxy}/v1/completions", json=body) as reply:
            async for line in reply.content:
                if not line.startswith(DATA) or line.startswith(DONE):
                    continue
                event = msgspec.json.decode(line[len(DATA) :])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    tokens += choice["token_ids"]
                    times.append(perf_counter())
        if len(tokens) != num_tokens:
            raise RuntimeError(f"{len(tokens)} tokens came instead of {num_tokens}")
        cost = usage.get("kv_transfer", {})
        return Step(
            times[1] - times[0],
            (times[-1] - times[1]) / max(1, len(tokens) - 1),
            len(prompt),
            new,
            tuple(tokens),
            cost.get("attention_bytes", 0),
            cost.get("state_bytes", 0),
            cost.get("decode_cached_tokens", 0),
        )

    async def _most_used(self, http: aiohttp.ClientSession) -> float:
        """The largest share of D's units in use, until it is cancelled."""
        most = 0.0
        try:
            while True:
                async with http.get(f"{self._decode}/metrics") as reply:
                    most = max(most, _usage(await reply.text()))
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            return most


def _usage(text: str) -> float:
    families = text_string_to_metric_families(text)
    return next(
        family.samples[0].value for family in families if family.name == "vllm:kv_cache_usage_perc"
    )


def _tokens(draw: random.Random, count: int) -> Iterator[int]:
    return (draw.randrange(2, SHARED["vocab_size"]) for _ in range(count))
