"""Runs a response's work until it is done or the client has left. Knows nothing of the work."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

CLEANUP_TIMEOUT_S = 10.0

_T = TypeVar("_T")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; when the client disconnects, cancels it and raises ClientDisconnect.

    The request's body must have been read. Cancelled work gets `CLEANUP_TIMEOUT_S` seconds to clean
    up.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching}, timeout=CLEANUP_TIMEOUT_S)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
