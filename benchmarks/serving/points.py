"""The points of a sweep, each measured on all targets by turns."""

import asyncio
import itertools
import math
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any, Self

import msgspec

from benchmarks.load.agreement import Agreement, Reference
from benchmarks.load.client import Client, TargetError
from benchmarks.load.loop import CLOSED, MOST_AT_ONCE, OWN_TIMES, Pace, Run, drive
from benchmarks.load.request import Request, salted, sessions_of
from benchmarks.load.summary import Summary, result
from benchmarks.serving.loads import first_sessions
from benchmarks.serving.options import QUICK_REQUESTS, ServingOptions
from benchmarks.serving.targets import Target
from benchmarks.serving.turns import Turns
from benchmarks.support.pairs import alternate
from engine.errors import ConfigError

PER_USER, RATE_S = 4, 10.0
# Of the time that is left, for the requests that the reference answers one by one.
REFERENCE_SHARE = 0.5
# The last runs must end in time with their servers, tables and plots.
RESERVE_S = 15.0


class Point(msgspec.Struct, frozen=True):
    """One setting of the sweep: so many users at once, or a rate."""

    at_once: int
    rate: float
    requests: int

    @classmethod
    def of(cls, options: ServingOptions) -> list[Self]:
        """All points: closed loops, then open ones."""
        few = QUICK_REQUESTS if options.quick else 0
        closed = [
            cls(users, CLOSED, options.requests or few or PER_USER * users)
            for users in options.concurrencies()
        ]
        opened = [
            cls(MOST_AT_ONCE, rate, options.requests or few or math.ceil(RATE_S * max(rate, 1.0)))
            for rate in options.rates()
        ]
        return closed + opened

    @property
    def name(self) -> str:
        """As it stands in the table."""
        if self.rate == OWN_TIMES:
            return "at its own times"
        return f"{self.at_once} at once" if self.rate == CLOSED else f"{self.rate:g} requests/s"

    def pace(self, options: ServingOptions, seconds: float) -> Pace:
        """How its load is sent; all of it within `seconds`."""
        return Pace(
            rate=self.rate,
            burstiness=options.burstiness,
            at_once=self.at_once,
            warmup=options.warmup,
            deadline_s=max(seconds, 1.0),
        )


class Measured(msgspec.Struct, frozen=True):
    """One run: its figures, how its answers agree, and its JSON in the shape of vLLM's bench."""

    run: Run
    summary: Summary
    agreement: Agreement
    result: dict[str, Any]


Rounds = dict[str, list[Measured]]


class Sweep:
    """Clients of all targets in one event loop, and the reference's answers."""

    def __init__(self, options: ServingOptions, loop: asyncio.Runner, ends_at: float) -> None:
        self._options = options
        self._loop = loop
        self._ends_at = ends_at - RESERVE_S
        self._clients: dict[str, Client] = {}
        self._turns = Turns((), ())
        self._stack = AsyncExitStack()
        self._reference = Reference()
        self._load: list[Request] = []
        self._runs = itertools.count()
        # An earlier benchmark may have left the same prompts in the caches of the same servers.
        self._salt = secrets.token_hex(4)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._turns.close()
        self._loop.run(self._stack.aclose())

    def connect(self, targets: Sequence[Target], reference: Target, load: list[Request]) -> None:
        """Raises TargetError for the first target that cannot be measured; asks the reference.

        Raises ConfigError for processes that no target has, and a load that is all warm-up.
        """
        sessions, warmup = len(sessions_of(load)), self._options.warmup
        if sessions <= warmup:
            raise ConfigError(f"a load of {sessions} sessions, of which --warmup takes {warmup}")
        self._turns = Turns(self._options.pid, [it.name for it in (*targets, reference)])
        self._load = load
        self._loop.run(self._connect(targets, reference, load))

    def measure(
        self, point: Point, rounds: int, *, until: float, done: Callable[[], None]
    ) -> Rounds:
        """All targets by turns, until `until` (monotonic) at the latest but for the first round."""
        ways = {name: lambda name=name: self._run(name, point) for name in self._clients}
        return alternate(ways, rounds, until=min(until, self._ends_at), done=done)

    async def _connect(
        self, targets: Sequence[Target], reference: Target, load: list[Request]
    ) -> None:
        for target in targets:
            self._clients[target.name] = await self._client(target, load[0])
        alone = await self._client(reference, load[0])
        now = monotonic()
        share = now + REFERENCE_SHARE * (self._ends_at - now)
        await self._reference.ask(alone, load, ends_at=share)

    async def _client(self, target: Target, like: Request) -> Client:
        self._turns.take(target.name)
        client = await self._stack.enter_async_context(target.client(self._options))
        try:
            async with asyncio.timeout(self._ends_at - monotonic()):
                await client.check(like)
        except TimeoutError as error:
            raise TargetError(
                f"{target.url} did not answer a request of two tokens in time: give more --minutes"
            ) from error
        return client

    def _run(self, name: str, point: Point) -> Measured:
        return self._loop.run(self._measure(name, point))

    async def _measure(self, name: str, point: Point) -> Measured:
        self._turns.take(name)
        options, client = self._options, self._clients[name]
        load = first_sessions(self._load, point.requests + options.warmup)
        load = salted(load, f"run {next(self._runs)} {self._salt}")
        pace = point.pace(options, self._ends_at - monotonic())
        run = await drive(client.send, load, pace)
        summary = Summary.of(run, options.objectives(), options.ranks())
        agreement = self._reference.judge(run, options.margin)
        found = result(summary, pace, target=name, model=client.model)
        cores = options.cores or os.cpu_count() or 1
        return Measured(run, summary, agreement, {**found, "cores": cores})
