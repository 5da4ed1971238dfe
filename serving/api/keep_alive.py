"""Pauses of a stream, told apart from its items, so that a reply can say that it goes on."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, TypeVar

KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment of server-sent events, which every client skips."""

CLEANUP_TIMEOUT_S: Final = 10.0

_T = TypeVar("_T")


async def with_pauses(
    items: AsyncIterator[_T], interval_s: float
) -> AsyncGenerator[_T | None, None]:
    """`items`, and None whenever none has come for `interval_s`; 0: never.

    The iterator's errors are raised as they are. Close it before `items` are closed.
    """
    if not interval_s:
        async for item in items:
            yield item
        return
    while True:
        coming = asyncio.create_task(_next(items))
        try:
            # Waiting cancels nothing: a pause must not end what it waits for.
            while not (await asyncio.wait({coming}, timeout=interval_s))[0]:
                yield None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming}, timeout=CLEANUP_TIMEOUT_S)
        came = coming.result()
        if not came:
            return
        yield came[0]


async def _next(items: AsyncIterator[_T]) -> tuple[()] | tuple[_T]:
    async for item in items:
        return (item,)
    return ()
