"""Turns by tenant: nobody waits for another tenant's queue, and no turn is lost."""

import asyncio
import random
from collections import Counter

import pytest

from engine.errors import OverloadedError
from engine.turns import Turns


async def test_tenants_take_turns_whoever_came_first() -> None:
    turns, order = Turns(1), list[str]()

    async def ask(tenant: str) -> None:
        async with turns.turn(tenant, 10):
            order.append(tenant)
            await asyncio.sleep(0)

    await turns.take("holder", 10)
    asked = [asyncio.create_task(ask(it)) for it in ("bob",) * 20 + ("alice",) * 2]
    await asyncio.sleep(0)
    turns.give_back("holder")
    await asyncio.gather(*asked)
    assert order[:4] == ["bob", "alice", "bob", "alice"] and order.count("bob") == 20


async def test_a_tenant_has_no_more_than_its_part_and_who_has_no_name_has_all() -> None:
    turns = Turns(3, per_tenant=1)
    assert [turns.take_now(it) for it in ("bob", "bob", "alice")] == [True, False, True]
    with pytest.raises(TimeoutError):
        await turns.take("bob", 0.01)
    for tenant in ("bob", "alice"):
        turns.give_back(tenant)
    assert [turns.take_now("") for _ in range(4)] == [True, True, True, False]


async def test_who_waits_with_too_many_is_refused() -> None:
    turns = Turns(1, max_waiting=2)
    await turns.take("a", 10)
    waiting = [asyncio.create_task(turns.take("bob", 10)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="2 requests of this tenant wait"):
        await turns.take("bob", 10)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    turns.give_back("a")
    assert turns.take_now("bob") and not turns._waiting


@pytest.mark.parametrize("seed", range(5))
async def test_turns_come_back_whatever_callers_do(seed: int) -> None:
    """Cancelled while waiting, while served, or in the moment between."""
    draw, turns = random.Random(seed), Turns(3, per_tenant=2)
    at_once: Counter[str] = Counter()

    async def ask(tenant: str) -> None:
        async with turns.turn(tenant, draw.choice((0.001, 10))):
            at_once[tenant] += 1
            assert at_once.total() <= 3 and at_once[tenant] <= 2
            try:
                await asyncio.sleep(0)
            finally:
                at_once[tenant] -= 1

    tasks = []
    for _ in range(400):
        tasks.append(asyncio.create_task(ask(draw.choice("abc"))))
        if draw.random() < 0.5:
            draw.choice(tasks).cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    allowed = asyncio.CancelledError | TimeoutError
    assert not [it for it in ends if it and not isinstance(it, allowed)]
    assert all(turns.take_now("") for _ in range(3)) and not turns._waiting
