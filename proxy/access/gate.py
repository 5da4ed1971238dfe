"""The way in: every client by its key, within its limits, and in its turn."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

from engine.api.access import Admitted
from engine.api.plan import Plan
from engine.http.callers import Caller, SingleKey
from proxy.access.api_key import ApiKey, KeyTable
from proxy.access.client import Client
from proxy.access.fair_queue import FairQueue, Share
from proxy.metrics import KeyMetrics

NOBODY: Final = Share("")


class Gate:
    """The `Callers` and the `Admission` of a proxy.

    `api_key` is that of an operator without limits, beside those of `set_keys`; None: there is no
    such key.
    """

    def __init__(self, api_key: str | None, queue: FairQueue, metrics: KeyMetrics) -> None:
        self._single = None if api_key is None else SingleKey(api_key)
        self._queue = queue
        self._metrics = metrics
        self._clients: dict[str, Client] = {}
        self._table = KeyTable(())

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """From now on these are the keys, at once and together.

        Who stays keeps what it has used. Requests under way of a key that is gone end as they
        would have ended.
        """
        clients = {}
        for key in keys:
            client = self._clients.get(key.name) or Client(key, self._metrics)
            client.policy = key
            clients[key.name] = client
        self._clients, self._table = clients, KeyTable(keys)

    def find(self, key: bytes) -> Caller | None:
        # Both are looked at, whichever it is.
        single = None if self._single is None else self._single.find(key)
        name = self._table.find(key)
        return single if name is None else self._clients[name]

    @asynccontextmanager
    async def admitting(self, plan: Plan, caller: Caller | None) -> AsyncIterator[Admitted]:
        """Waits for the turn of the caller's tenant. See `Client` and `FairQueue` for refusals."""
        async with AsyncExitStack() as stack:
            if not isinstance(caller, Client):
                await stack.enter_async_context(self._place(NOBODY, plan))
                yield Admitted(plan)
                return
            plan = caller.shaped(plan)
            with caller.waiting(plan):
                await stack.enter_async_context(self._place(caller.share, plan))
            yield Admitted(plan, caller.on_tokens)

    def _place(self, share: Share, plan: Plan) -> AbstractAsyncContextManager[None]:
        return self._queue.place(share, num_sequences=len(plan.requests), cost=cost(plan))


def cost(plan: Plan) -> float:
    """Tokens that a request may take: prompts, and as much as it may generate."""
    return plan.num_prompt_tokens + sum(it.sampling.max_tokens for it in plan.requests)
