"""Messages to peers, as tasks of the event loop: a silent peer delays nobody else's.

peer a:  | running | running | running | running | waits | waits ...     `PER_PEER` at once
peer b:  | running |                                     `MAX_CALLS` in all, or one is refused
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from engine.errors import OverloadedError, TandemError

log = structlog.get_logger()
Call = Callable[[], Coroutine[Any, Any, None]]

PER_PEER: Final = 4
MAX_CALLS: Final = 16_384
MAX_STRANGERS: Final = 64
"""Addresses where nobody has answered yet: whoever names more is refused at once."""


@dataclass(slots=True)
class _Lane:
    """The calls to one peer that are not over."""

    is_stranger: bool
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PER_PEER))
    num_calls: int = 0


class PeerCalls:
    """Owner of the tasks. Each call has its own deadline."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, peer: str, call: Call, *, is_stranger: bool = False) -> asyncio.Task[None]:
        """Runs `call` when `peer` has less than `PER_PEER` calls under way.

        Raises OverloadedError when too many calls are not over, or calls to too many strangers.
        """
        if len(self._tasks) >= MAX_CALLS:
            raise OverloadedError(f"{MAX_CALLS} calls to peers wait already")
        lane = self._lanes.get(peer)
        if lane is None:
            if is_stranger and sum(it.is_stranger for it in self._lanes.values()) >= MAX_STRANGERS:
                raise OverloadedError(f"{MAX_STRANGERS} peers wait already for a first answer")
            lane = self._lanes[peer] = _Lane(is_stranger)
        lane.num_calls += 1
        task = asyncio.get_running_loop().create_task(self._run(peer, lane, call))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Returns when every call has ended, the waiting ones too."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Logs what is a bug and no peer's error: the caller, who would see it, may have left."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TandemError):
            log.error("a call to a peer failed", exc_info=error)

    async def _run(self, peer: str, lane: _Lane, call: Call) -> None:
        try:
            async with lane.turns:
                await call()
        finally:
            lane.num_calls -= 1
            if not lane.num_calls:
                del self._lanes[peer]
