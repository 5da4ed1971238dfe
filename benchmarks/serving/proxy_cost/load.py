"""The load of `proxy_cost`, and the CPU seconds of the process that bears it."""

import asyncio
import ctypes
import itertools
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import uvloop
from grpc import aio

from engine.types import GenerateRequest, SamplingParams
from serving.rpc.channel import OPTIONS
from serving.rpc.convert import prompt_to_bytes, request_to_bytes
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import NodeStub

PATH = "/v1/completions"
HEADERS = {"Content-Type": "application/json"}
PROMPT_TOKENS, SHORT_PROMPT_TOKENS = 8192, 64
MAX_TOKEN_ID = 151_000
AT_ONCE = 4
MAX_PROMPTS = 16
EDGE = 8
"""Tokens of each stream at its beginning and end that do not count: others start or end then."""
TIMEOUT_S = 60.0
LIBC = ctypes.CDLL(None)


@dataclass(slots=True, frozen=True)
class Target:
    """A server, and the process whose CPU seconds count."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """User and system time so far, of all its threads; exact, unlike the ticks in /proc."""
        clock = ctypes.c_int()
        if error := LIBC.clock_getcpuclockid(self.pid, ctypes.byref(clock)):
            raise OSError(error, "no clock of the process")
        return time.clock_gettime(clock.value)


@dataclass(slots=True)
class Window:
    """CPU seconds and tokens from the moment all streams run until the first one is about to end.

    What a request costs at its start and end is so left to the other load.
    """

    target: Target
    counts: list[int]
    num_each: int
    begin: tuple[float, int] | None = None
    end: tuple[float, int] | None = None

    def add(self, stream: int) -> None:
        """One more token of `stream`."""
        self.counts[stream] += 1
        if self.begin is None:
            if min(self.counts) >= EDGE:
                self.begin = self._now()
        elif self.end is None and self.counts[stream] >= self.num_each - EDGE:
            self.end = self._now()

    def micros_per_token(self) -> float:
        """Raises RuntimeError where all streams ran at once for too short a time to be measured."""
        if self.begin is None or self.end is None:
            raise RuntimeError("the streams did not run at the same time")
        seconds, tokens = self.end[0] - self.begin[0], self.end[1] - self.begin[1]
        if seconds <= 0 or tokens <= 0:
            raise RuntimeError(f"all streams ran at once for {tokens} tokens only")
        return 1e6 * seconds / tokens

    def _now(self) -> tuple[float, int]:
        return self.target.cpu_s(), sum(self.counts)


def prompts(num_tokens: int, count: int) -> list[list[int]]:
    """`count` different ones."""
    draw = random.Random(num_tokens)
    return [[draw.randrange(MAX_TOKEN_ID) for _ in range(num_tokens)] for _ in range(count)]


def micros_per_request(target: Target, num_requests: int) -> float:
    """CPU microseconds of a request with 8,192 token ids and one token of output."""
    some = prompts(PROMPT_TOKENS, min(MAX_PROMPTS, num_requests))
    bodies = [_body(prompt, max_tokens=1) for prompt in some]
    return asyncio.run(_ask_all(target, itertools.islice(itertools.cycle(bodies), num_requests)))


def micros_per_token(target: Target, num_streams: int, num_each: int) -> float:
    """CPU microseconds of a token of one of many streams."""
    bodies = [
        _body(prompt, max_tokens=num_each, stream=True)
        for prompt in prompts(SHORT_PROMPT_TOKENS, num_streams)
    ]
    window = Window(target, [0] * num_streams, num_each)
    asyncio.run(_stream_all(bodies, window))
    return window.micros_per_token()


def micros_per_message(address: str, num_streams: int, num_each: int) -> float:
    """CPU microseconds of this process for a token that comes over gRPC and is thrown away."""
    window = Window(Target("", os.getpid()), [0] * num_streams, num_each)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=num_each),
        )
        for number, prompt in enumerate(prompts(SHORT_PROMPT_TOKENS, num_streams))
    ]
    bodies = [request_to_bytes(each, prompt_to_bytes(each)) for each in requests]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_read_all(address, bodies, window))
    return window.micros_per_token()


async def _ask_all(target: Target, bodies: Iterable[bytes]) -> float:
    async with _session(target.url) as session:
        left, before = list(bodies), target.cpu_s()
        num_requests = len(left)

        async def client() -> None:
            while left:
                await _ask(session, left.pop())

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        return 1e6 * (target.cpu_s() - before) / num_requests


async def _stream_all(bodies: Sequence[bytes], window: Window) -> None:
    async with _session(window.target.url) as session:
        streams = (
            _read(session, body, window, number=number) for number, body in enumerate(bodies)
        )
        await asyncio.gather(*streams)


async def _read_all(address: str, bodies: Sequence[bytes], window: Window) -> None:
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        call: Any = NodeStub(channel).Attach()  # type: ignore[no-untyped-call]
        for number, body in enumerate(bodies):
            await call.write(pb.Command(number=number, request=body))
        left = window.num_each * len(bodies)
        while left:
            happened = (await call.read()).happened
            for one in happened:
                window.add(one.number)
            left -= len(happened)
        call.cancel()


def _body(prompt: list[int], **options: Any) -> bytes:
    return msgspec.json.encode({"prompt": prompt, **options})


def _session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url,
        headers=HEADERS,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        raise_for_status=True,
    )


async def _ask(session: aiohttp.ClientSession, body: bytes) -> None:
    async with session.post(PATH, data=body) as reply:
        text = msgspec.json.decode(await reply.read())["choices"][0]["text"]
        if not text:
            raise RuntimeError("an answer without its token")


async def _read(
    session: aiohttp.ClientSession, body: bytes, window: Window, *, number: int
) -> None:
    async with session.post(PATH, data=body) as reply:
        lines = (line async for line in reply.content if line.startswith(b"data: {"))
        async for _ in lines:
            window.add(number)
    # Tokens that reach the proxy in one read leave it in one event, which counts as one.
    if window.counts[number] < window.num_each - EDGE:
        raise RuntimeError(f"a stream ended after {window.counts[number]} tokens")
