"""Calls in the thread of an engine that runs."""

import asyncio
from collections.abc import Callable

from engine.async_engine import AsyncEngine

DEADLINE_S = 30.0


async def run_in_engine(engine: AsyncEngine, call: Callable[[], None]) -> None:
    """Runs `call` in the engine thread between two steps and waits for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def guarded() -> None:
        call()
        loop.call_soon_threadsafe(done.set_result, None)

    engine._inbox.put(guarded)
    await asyncio.wait_for(done, DEADLINE_S)
