"""The proxy's queue against its promise: tenants that wait share by weight, whoever sends more."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from engine.errors import OverloadedError
from proxy.access.fair_queue import FairQueue, Places, Share


@asynccontextmanager
async def place(queue: FairQueue, share: Share, cost: float) -> AsyncIterator[None]:
    """Waits for the place of a request with one sequence, and holds it."""
    places = Places(queue, share, cost)
    async with places.waited_for(), places.place():
        yield


@dataclass(slots=True)
class Service:
    """Requests that wait in one queue, in the order in which they are served."""

    queue: FairQueue
    order: list[tuple[str, float]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def ask(self, share: Share, cost: float, *, ends: bool = True) -> None:
        """Puts a request into the queue; it ends as soon as it is served, if `ends`."""
        self.tasks.append(asyncio.create_task(self._serve(share, cost, ends=ends)))
        await asyncio.sleep(0)

    async def _serve(self, share: Share, cost: float, *, ends: bool) -> None:
        try:
            async with place(self.queue, share, cost):
                self.order.append((share.tenant, cost))
                await (asyncio.sleep(0) if ends else asyncio.Event().wait())
        except OverloadedError:
            self.refused.append(share.tenant)

    async def all_served(self) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*self.tasks, return_exceptions=True)


async def full(queue: FairQueue) -> tuple[Service, asyncio.Task[None]]:
    """A queue whose one place is taken until the task is cancelled."""
    service = Service(queue)
    await service.ask(Share("holder"), 1, ends=False)
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
            async with place(queue, Share(name), cost):
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
        async with place(service.queue, Share("a"), 1):
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
        places = Places(queue, Share(name), cost=draw.uniform(1, 9))

        async def sequence() -> None:
            nonlocal most
            async with places.place():
                most = max(most, queue.num_running)
                for _ in range(draw.randint(0, 3)):
                    await asyncio.sleep(0)

        async with places.waited_for():
            await asyncio.gather(*(sequence() for _ in range(draw.randint(0, 5))))

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
    assert len(service.queue._waiting["a"]) < 300
    holder.cancel()


async def held(queue: FairQueue, tenant: str, count: int) -> list[asyncio.Task[None]]:
    """Sequences of one tenant that hold places, or wait, until they are cancelled."""
    service = Service(queue)
    for _ in range(count):
        await service.ask(Share(tenant), 1, ends=False)
    return service.tasks


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_comes_to_a_cluster_that_another_fills_begins_at_once() -> None:
    queue = FairQueue(16, 100, 60)
    queue.num_tenants = 2
    flood = await held(queue, "bob", 40)
    assert queue.num_running == 14, "one of eight is kept"
    guest = await held(queue, "alice", 3)
    assert queue.num_running == 16, "for those that hold fewer than these"
    await ended(*flood[:2])
    assert queue.num_running == 16, "nobody else is there for whom places could be kept"
    await ended(*flood, *guest)
    assert (queue.num_running, queue.num_waiting, len(queue._waiting)) == (0, 0, 0)


async def test_one_tenant_alone_has_all_places() -> None:
    queue = FairQueue(16, 100, 60)
    tasks = await held(queue, "", 20)
    assert queue.num_running == 16
    await ended(*tasks)


async def test_sequences_of_one_request_come_in_one_by_one() -> None:
    """So that nobody waits until all the places that it asks for are free at once."""
    queue = FairQueue(4, 100, 60)
    (busy, other), guest = await held(queue, "alice", 2), Service(queue)
    many = Places(queue, Share("bob"), cost=1)
    async with many.waited_for():
        sequences = [asyncio.ensure_future(hold(many)) for _ in range(8)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert queue._held == {"alice": 2, "bob": 2}
        await guest.ask(Share("alice"), 1)
        await ended(busy)
        assert queue.num_running == 4
        await ended(*sequences, other)
    await guest.all_served()
    assert guest.order == [("alice", 1)]
    assert queue.num_running == 0


async def hold(places: Places) -> None:
    async with places.place():
        await asyncio.Event().wait()


@pytest.mark.parametrize("seed", range(10))
async def test_places_go_as_by_a_plain_model(seed: int) -> None:
    """Brute force: of the tenants that may have another place, the first in virtual time."""
    draw = random.Random(seed)
    size, kept = 17, 2
    queue = FairQueue(size, 10_000, 60)
    queue.num_tenants = 3
    taken: list[str] = []
    waiting: list[tuple[float, int, str]] = []
    ends, now, held_by, model = dict.fromkeys("abc", 0.0), 0.0, dict.fromkeys("abc", 0), list[str]()

    async def ask(name: str, cost: float) -> None:
        async with place(queue, Share(name), cost):
            taken.append(name)
            await asyncio.Event().wait()

    def let_in() -> None:
        nonlocal now
        while True:
            free = size - sum(held_by.values())
            lacking = {it: max(0, kept - held_by[it]) for it in "abc"}
            may = {
                it
                for it in "abc"
                if free > min(kept, sum(lacking.values()) - lacking[it]) or (free and lacking[it])
            }
            ready = [it for it in sorted(waiting) if it[2] in may]
            if not ready:
                return
            waiting.remove(ready[0])
            now = max(now, ready[0][0])
            held_by[ready[0][2]] += 1
            model.append(ready[0][2])

    tasks: dict[str, list[asyncio.Task[None]]] = {it: [] for it in "abc"}
    for number in range(200):
        name, cost = draw.choice("aaabbc"), draw.uniform(1, 9)
        waiting.append((max(now, ends[name]), number, name))
        ends[name] = max(now, ends[name]) + cost
        tasks[name].append(asyncio.create_task(ask(name, cost)))
        await asyncio.sleep(0)
        let_in()
        if draw.random() < 0.7 and held_by[leaver := draw.choice("abc")]:
            held_by[leaver] -= 1
            await ended(tasks[leaver].pop(0))
            let_in()
        await asyncio.sleep(0)
        assert taken == model, number
    await ended(*(it for mine in tasks.values() for it in mine))
    assert (queue.num_running, queue.num_waiting) == (0, 0)
