"""Patience ends one wait that is too long, and counts neither short waits nor the time between."""

import asyncio
from contextlib import closing

from serving.rpc.client import Patience

LIMIT_S = 0.1
END_S = 10.0


async def test_a_wait_beyond_the_limit_gives_up_once() -> None:
    gave_up: list[int] = []
    came = asyncio.Event()

    def give_up() -> None:
        gave_up.append(1)
        came.set()

    with closing(Patience(LIMIT_S, give_up)) as patience:
        async with asyncio.timeout(END_S):
            with patience:
                await came.wait()
        assert patience.is_over
        with patience:
            await asyncio.sleep(3 * LIMIT_S)
    assert gave_up == [1]


async def test_short_waits_and_the_time_between_do_not_count() -> None:
    """All of it lasts longer than the limit, and the timer ends in waits and between them."""
    with closing(Patience(LIMIT_S, lambda: None)) as patience:
        for pause_s in (0.0, 1.5 * LIMIT_S, 0.0, 0.0, 0.0):
            with patience:
                await asyncio.sleep(0.4 * LIMIT_S)
            await asyncio.sleep(pause_s)
        assert not patience.is_over


async def test_a_later_wait_is_watched_too() -> None:
    came = asyncio.Event()
    with closing(Patience(LIMIT_S, came.set)) as patience:
        with patience:
            pass
        await asyncio.sleep(1.5 * LIMIT_S)
        async with asyncio.timeout(END_S):
            with patience:
                await came.wait()


async def test_a_closed_one_gives_up_no_more() -> None:
    patience = Patience(LIMIT_S, lambda: None)
    with patience:
        patience.close()
        await asyncio.sleep(2 * LIMIT_S)
    assert not patience.is_over
