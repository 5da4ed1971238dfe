"""Tells P that nobody will pull a finished prefill, in the background. Best effort: leases end
anyway."""

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
    """Owns its background calls. They are tasks because a cancelled request may not await any
    more."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Task[None]] = set()

    def release(self, node: Node, params: KVTransferParams) -> None:
        """Returns at once; beyond `MAX_PENDING` calls the lease's own end has to do."""
        if len(self._pending) >= MAX_PENDING:
            return
        task = asyncio.create_task(_release(node, params))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """Waits for what is pending; each call has its own short deadline."""
        await asyncio.gather(*self._pending)


async def _release(node: Node, params: KVTransferParams) -> None:
    if params.remote_engine_id is None or params.remote_request_id is None:
        return
    try:
        await node.client.release(
            params.remote_engine_id,
            params.remote_request_id,
            reason="abort",
            timeout_s=RELEASE_TIMEOUT_S,
        )
    except TandemError as error:
        log.info("prefill is left to its lease", node=node.name, problem=str(error))
