"""Sends a load to one target: so many sessions at once, at a rate, or at their own times.

A closed loop of N users has `at_once=N` and no rate; each user starts the next session as soon as
the last one has ended. An open loop has a rate: sessions start when they are due, whatever became
of those before, with gaps drawn as `vllm bench serve` draws them.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import msgspec

from benchmarks.load.reply import Reply
from benchmarks.load.request import Request, sessions_of

MOST_AT_ONCE = 1024
OWN_TIMES = 0.0
CLOSED = math.inf


class Send(Protocol):
    """Sends one request that is due at a time of `perf_counter`."""

    async def __call__(self, request: Request, due: float | None = None) -> Reply:
        """Returns the reply; raises nothing that a server may cause."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a load is sent.

    `rate`: sessions that start per second; CLOSED starts them as `at_once` allows, OWN_TIMES when
    their first requests say. `burstiness`: shape of the gamma distribution of gaps; 1 is Poisson,
    less comes in bursts. `at_once`: sessions under way at most. `warmup`: so many of the first
    sessions run before all others, in a closed loop, and are told apart. After `deadline_s`
    nothing more is sent, and what is under way is given up.
    """

    rate: float = CLOSED
    burstiness: float = 1.0
    at_once: int = MOST_AT_ONCE
    warmup: int = 0
    deadline_s: float = 600.0
    seed: int = 0


class Run(msgspec.Struct, frozen=True):
    """Requests as sent, in the order of the load, and their replies; seconds of wall time."""

    requests: tuple[Request, ...]
    replies: tuple[Reply, ...]
    warmup: tuple[Reply, ...]
    seconds: float


async def drive(
    send: Send, requests: Sequence[Request], pace: Pace, *, done: Callable[[], None] | None = None
) -> Run:
    """Sends all `requests`; `done` is called after each answer."""
    sessions = [[requests[place] for place in places] for places in sessions_of(requests)]
    first, rest = sessions[: pace.warmup], sessions[pace.warmup :]
    if not rest:
        raise ValueError(f"{len(sessions)} sessions, {pace.warmup} of them warm-up: none is left")
    player = _Player(send, pace, done or (lambda: None))
    warmup = await player.play(first, [0.0] * len(first))
    started = perf_counter()
    played = await player.play(rest, starts(rest, pace))
    seconds = perf_counter() - started
    return Run(
        tuple(request for request, _ in played),
        tuple(reply for _, reply in played),
        tuple(reply for _, reply in warmup),
        seconds,
    )


def starts(sessions: Sequence[Sequence[Request]], pace: Pace) -> list[float]:
    """When each session starts, in seconds from the start.

    Drawn gaps are scaled so that the last session starts after exactly `len(sessions) / rate`.
    """
    if pace.rate == OWN_TIMES:
        own = [session[0].arrival_s for session in sessions]
        return [arrival - min(own) for arrival in own]
    if pace.rate == CLOSED:
        return [0.0] * len(sessions)
    draw = random.Random(pace.seed)
    gaps = [draw.gammavariate(pace.burstiness, 1.0) for _ in sessions]
    times = list(itertools.accumulate(gaps))
    return [time * len(sessions) / (pace.rate * times[-1]) for time in times]


class _Player:
    """Plays sessions within one deadline."""

    def __init__(self, send: Send, pace: Pace, done: Callable[[], None]) -> None:
        self._send = send
        self._pace = pace
        self._done = done
        self._deadline = perf_counter() + pace.deadline_s

    async def play(
        self, sessions: Sequence[Sequence[Request]], starts: Sequence[float]
    ) -> list[tuple[Request, Reply]]:
        """All requests as they were sent, with their answers, session after session."""
        slots = asyncio.Semaphore(self._pace.at_once)
        begun = perf_counter()
        async with asyncio.TaskGroup() as tasks:
            played = [
                tasks.create_task(self._session(session, slots, (begun, start)))
                for session, start in zip(sessions, starts, strict=True)
            ]
        return [pair for task in played for pair in task.result()]

    async def _session(
        self, session: Sequence[Request], slots: asyncio.Semaphore, times: tuple[float, float]
    ) -> list[tuple[Request, Reply]]:
        begun, start = times
        await self._sleep_until(begun + start)
        pairs: list[tuple[Request, Reply]] = []
        async with slots:
            # In a closed loop a session is due when its user has time for it.
            due = perf_counter() if self._pace.rate == CLOSED else begun + start
            for request in session:
                if pairs:
                    own = begun + start + request.arrival_s - session[0].arrival_s
                    due = max(pairs[-1][1].ended + request.think_s, own)
                    await self._sleep_until(due)
                pairs.append(await self._next(request, due, pairs))
                self._done()
        return pairs

    async def _next(
        self, request: Request, due: float, before: Sequence[tuple[Request, Reply]]
    ) -> tuple[Request, Reply]:
        if before and request.continues:
            asked, answer = before[-1]
            if answer.error:
                return request, Reply.unsent(perf_counter(), "the request before it failed")
            request = request.after(asked, answer)
        return request, await self._ask(request, due)

    async def _ask(self, request: Request, due: float) -> Reply:
        sent = perf_counter()
        left = self._deadline - sent
        if left <= 0:
            return Reply.unsent(sent, f"not sent within {self._pace.deadline_s:g} s")
        try:
            async with asyncio.timeout(left):
                return await self._send(request, due)
        except TimeoutError:
            error = f"given up: the run had {self._pace.deadline_s:g} s"
            return Reply(due=due, sent=sent, ended=perf_counter(), error=error)

    async def _sleep_until(self, due: float) -> None:
        await asyncio.sleep(max(0.0, min(due, self._deadline) - perf_counter()))
