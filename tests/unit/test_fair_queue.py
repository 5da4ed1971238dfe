"""The proxy's queue against its promise: tenants that wait share by weight, whoever sends more."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from engine.errors import OverloadedError
from proxy.access.fair_queue import FairQueue, Share


@dataclass(slots=True)
class Service:
    """Requests that wait in one queue, in the order in which they are served."""

    queue: FairQueue
    order: list[tuple[str, float]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def ask(self, share: Share, cost: float, *, size: int = 1, ends: bool = True) -> None:
        """Puts a request into the queue; it ends as soon as it is served, if `ends`."""
        self.tasks.append(asyncio.create_task(self._serve(share, cost, size=size, ends=ends)))
        await asyncio.sleep(0)

    async def _serve(self, share: Share, cost: float, *, size: int, ends: bool) -> None:
        try:
            async with self.queue.place(share, num_sequences=size, cost=cost):
                self.order.append((share.tenant, cost))
                await (asyncio.sleep(0) if ends else asyncio.Event().wait())
        except OverloadedError:
            self.refused.append(share.tenant)

    async def all_served(self) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*self.tasks, return_exceptions=True)


async def full(queue: FairQueue, num: int = 1) -> tuple[Service, asyncio.Task[None]]:
    """A queue whose places are taken until the task is cancelled."""
    service = Service(queue)
    await service.ask(Share("holder"), 1, size=num, ends=False)
    holder = service.tasks.pop()
    service.order.clear()
    return service, holder


@pytest.mark.parametrize("seed", range(20))
async def test_those_who_wait_share_by_weight(seed: int) -> None:
    """At any moment at which both wait, no tenant is ahead by more than two requests."""
    draw = random.Random(seed)
    weights = {name: draw.choice((0.5, 1.0, 3.0)) for name in "abc"}
    service, holder = await full(FairQueue(1, 10_000, 60))
    asked = [(draw.choice("aaaabbc"), draw.uniform(1, 100)) for _ in range(300)]
    for name, cost in asked:
        await service.ask(Share(name, weights[name]), cost)
    holder.cancel()
    await service.all_served()
    assert sorted(service.order) == sorted(asked)
    done = dict.fromkeys("abc", 0.0)
    left = {name: sum(tenant == name for tenant, _ in asked) for name in "abc"}
    for name, cost in service.order:
        done[name] += cost / weights[name]
        left[name] -= 1
        waiting = [done[other] for other in "abc" if left[other]]
        assert not waiting or max(waiting) - min(waiting) <= 2 * 100 / 0.5


async def test_requests_of_one_tenant_keep_their_order() -> None:
    service, holder = await full(FairQueue(1, 100, 60))
    for cost in range(1, 30):
        await service.ask(Share("a"), 30 - cost)
    holder.cancel()
    await service.all_served()
    assert [cost for _, cost in service.order] == [30 - cost for cost in range(1, 30)]


async def test_those_who_ask_again_and_again_share_tokens_not_requests() -> None:
    """The queue is short, and now and then empty; what each tenant had counts all the same."""
    queue = FairQueue(1, 100, 60)
    served: list[str] = []

    async def keep_asking(name: str, cost: float) -> None:
        while len(served) < 200:
            async with queue.place(Share(name), num_sequences=1, cost=cost):
                served.append(name)
                await asyncio.sleep(0)

    async with asyncio.timeout(10):
        both = (("large", 90), ("small", 10))
        await asyncio.gather(*(keep_asking(*one) for one in both for _ in range(2)))
    # Every tenth is fair; taking turns would be every second.
    assert 15 <= served.count("large") <= 25


async def test_a_lower_priority_goes_first() -> None:
    service, holder = await full(FairQueue(1, 100, 60))
    for name, priority in (("last", 5), ("mid", 0), ("first", -5)):
        await service.ask(Share(name, priority=priority), 1)
        await service.ask(Share(name, priority=priority), 1)
    holder.cancel()
    await service.all_served()
    assert [name for name, _ in service.order] == ["first"] * 2 + ["mid"] * 2 + ["last"] * 2


async def test_a_full_queue_drops_the_last_of_whoever_waits_most() -> None:
    service, holder = await full(FairQueue(1, 10, 60))
    for cost in range(1, 11):
        await service.ask(Share("flood"), cost)
    await service.ask(Share("guest"), 5)
    await service.ask(Share("flood"), 11)
    await asyncio.sleep(0)
    assert service.refused == ["flood", "flood"]
    holder.cancel()
    await service.all_served()
    assert ("guest", 5) in service.order
    assert [cost for name, cost in service.order if name == "flood"] == list(range(1, 10))


async def test_what_was_dropped_does_not_count_against_its_tenant() -> None:
    service, holder = await full(FairQueue(1, 4, 60))
    for _ in range(100):
        await service.ask(Share("flood"), 1000)
    await service.ask(Share("guest"), 1000)
    await service.ask(Share("guest"), 1000)
    holder.cancel()
    await service.all_served()
    served = [name for name, _ in service.order]
    assert sorted(served) == ["flood"] * 2 + ["guest"] * 2
    assert served[:2].count("flood") == 1, "its two come in turn with the guest's"


async def test_who_waits_too_long_is_told_to_come_back() -> None:
    service, holder = await full(FairQueue(1, 10, 0.02))
    with pytest.raises(OverloadedError, match="no turn within") as refused:
        async with service.queue.place(Share("a"), num_sequences=1, cost=1):
            pass
    assert refused.value.retry_after_s > 0
    holder.cancel()
    await asyncio.gather(holder, return_exceptions=True)
    assert (service.queue.num_waiting, service.queue.num_running) == (0, 0)


@pytest.mark.parametrize("seed", range(10))
async def test_places_come_back_whatever_callers_do(seed: int) -> None:
    """Cancelled while waiting, while served, or in the moment between: no place is lost."""
    draw = random.Random(seed)
    queue = FairQueue(3, 5, 60)
    most = 0

    async def ask(name: str) -> None:
        nonlocal most
        size = draw.randint(1, 5)
        async with queue.place(Share(name), num_sequences=size, cost=draw.uniform(1, 9)):
            most = max(most, queue.num_running)
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(400):
        tasks.append(asyncio.create_task(ask(draw.choice("ab"))))
        if draw.random() < 0.5:
            draw.choice(tasks).cancel()
        if draw.random() < 0.7:
            await asyncio.sleep(0)
        assert queue.num_waiting <= 6
    async with asyncio.timeout(10):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    bad = [
        it for it in ended if it and not isinstance(it, OverloadedError | asyncio.CancelledError)
    ]
    assert bad == []
    assert (queue.num_waiting, queue.num_running) == (0, 0)
    assert most == 3


async def test_many_that_gave_up_take_no_memory() -> None:
    service, holder = await full(FairQueue(1, 10, 60))
    for _ in range(2000):
        await service.ask(Share("a"), 1)
        service.tasks.pop().cancel()
        await asyncio.sleep(0)
    assert len(service.queue._heap) < 200
    holder.cancel()
