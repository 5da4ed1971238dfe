"""The way in: every client by its key, within its limits, and in its turn."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Final

from proxy.access.api_key import ApiKey, KeyTable
from proxy.access.client import Client
from proxy.access.fair_queue import FairQueue, Places, Share
from proxy.metrics import ProxyMetrics
from serving.api.access import Admitted
from serving.api.plan import Plan
from serving.http.callers import KeyHolder, SingleKey

NOBODY: Final = Share("")


class Gate:
    """The `KeyHolders` and the `Admission` of a proxy.

    `api_key` is that of an operator without limits, beside those of `set_keys`; None: there is no
    such key.
    """

    def __init__(self, api_key: str | None, queue: FairQueue, metrics: ProxyMetrics) -> None:
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
        # Whoever has the operator's key, or none, is a tenant too.
        tenants = {key.owner for key in keys}
        self._queue.num_tenants = len(tenants) + (self._single is not None)

    def find(self, key: bytes) -> KeyHolder | None:
        # Both are looked at, whichever it is.
        single = None if self._single is None else self._single.find(key)
        name = self._table.find(key)
        return single if name is None else self._clients[name]

    @asynccontextmanager
    async def admitting(self, plan: Plan, holder: KeyHolder | None) -> AsyncIterator[Admitted]:
        """Waits for the turn of the holder's tenant. See `Client` and `FairQueue` for refusals."""
        client = holder if isinstance(holder, Client) else None
        # Tokens that a sequence may take: its part of the prompts, and as much as it may generate.
        generated = sum(it.sampling.max_tokens for it in plan.requests)
        cost = (plan.num_prompt_tokens + generated) / len(plan.requests)
        places = Places(self._queue, client.share if client else NOBODY, cost)
        async with AsyncExitStack() as stack:
            with client.waiting(plan.num_prompt_tokens) if client else nullcontext():
                await stack.enter_async_context(places.waited_for())
            yield Admitted(client.on_tokens if client else None, places.place)
