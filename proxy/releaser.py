"""Tells P, in the background, that nobody will pull a prefill. Best effort: leases end anyway."""

import asyncio
from typing import Final

import structlog

from engine.errors import TandemError
from engine.types import KVTransferParams
from proxy.cluster.node import Node

log = structlog.get_logger()

MAX_PENDING: Final = 256
RELEASE_TIMEOUT_S: Final = 2.0


class Releaser:
    """Owns its background calls: tasks, because a cancelled request may not await any more."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Task[None]] = set()

    def release(self, node: Node, params: KVTransferParams) -> None:
        """The prefill that P has described in its answer."""
        if params.remote_engine_id is not None and params.remote_request_id is not None:
            self._start(node, params.remote_engine_id, params.remote_request_id)

    def release_unheard(self, node: Node, request_id: str) -> None:
        """What P may have finished for `request_id`, although its answer was not waited for."""
        if node.info is not None:
            self._start(node, node.info.engine_id, request_id)

    def _start(self, node: Node, engine_id: str, request_id: str) -> None:
        """Returns at once; beyond `MAX_PENDING` calls the lease's own end has to do."""
        if len(self._pending) >= MAX_PENDING:
            return
        task = asyncio.create_task(_release(node, engine_id, request_id))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """Waits for what is pending; each call has its own short deadline."""
        await asyncio.gather(*self._pending)


async def _release(node: Node, engine_id: str, request_id: str) -> None:
    try:
        await node.client.release(
            engine_id, request_id, reason="abort", timeout_s=RELEASE_TIMEOUT_S
        )
    except TandemError as error:
        log.info("prefill is left to its lease", node=node.name, problem=str(error))
