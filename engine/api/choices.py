"""Follows the generation of each choice, step by step, into deltas. Knows no reply shape."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from engine.api.choice_text import ChoiceText, Delta
from engine.api.plan import Plan
from engine.api.tokenizer import Tokenizer
from engine.errors import RequestAbortedError, TandemError
from engine.generator import Generator
from engine.types import FinishReason, GenerateOutput

_T = TypeVar("_T")
_Waiting = dict[asyncio.Future[tuple[_T, ...]], AsyncGenerator[_T, None]]


class EndedEarlyError(TandemError):
    """A generator's stream ended, or an output said `error`, before the request was finished."""


async def follow_choice(
    generator: Generator, plan: Plan, index: int, *, tokenizer: Tokenizer
) -> AsyncGenerator[Delta, None]:
    """Deltas of choice `index`; the last one has a finish reason.

    Closing it cancels the generation.

    Raises what the generator raises, and EndedEarlyError or RequestAbortedError when it did not
    finish.
    """
    text = ChoiceText(plan, index, tokenizer)
    finished = False
    async with aclosing(generator.generate(plan.requests[index])) as outputs:
        async for output in outputs:
            _refuse_failure(output)
            delta = text.take(output)
            yield delta
            finished = delta.finish_reason is not None
            if finished and output.finish_reason is None:
                return
    if not finished:
        raise EndedEarlyError(f"request {plan.id} ended without a finish reason")


def _refuse_failure(output: GenerateOutput) -> None:
    if output.finish_reason is FinishReason.ABORT:
        raise RequestAbortedError("the request was aborted on the node: send it again")
    if output.finish_reason is FinishReason.ERROR:
        raise EndedEarlyError("the engine could not finish the request")


def follow(generator: Generator, plan: Plan, tokenizer: Tokenizer) -> AsyncGenerator[Delta, None]:
    """Deltas of all choices of a plan, as they come."""
    streams = [
        follow_choice(generator, plan, index, tokenizer=tokenizer)
        for index in range(len(plan.requests))
    ]
    return streams[0] if len(streams) == 1 else merge(streams)


async def merge(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Items of all streams as they come, at most one ahead each; the first error ends all."""
    waiting: _Waiting[_T] = {asyncio.ensure_future(_next_item(s)): s for s in streams}
    try:
        async with aclosing(_as_they_come(waiting)) as items:
            async for item in items:
                yield item
    finally:
        await _close_all(list(waiting), streams)


async def _as_they_come(waiting: _Waiting[_T]) -> AsyncGenerator[_T, None]:
    """Keeps `waiting` true: it holds one task for each stream that has not ended."""
    while waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in waiting if task in done]:
            stream = waiting.pop(task)
            for item in task.result():
                yield item
                waiting[asyncio.ensure_future(_next_item(stream))] = stream


async def _next_item(stream: AsyncGenerator[_T, None]) -> tuple[_T, ...]:
    """The next item alone, or nothing when the stream has ended."""
    try:
        return (await anext(stream),)
    except StopAsyncIteration:
        return ()


async def _close_all(
    tasks: Sequence[asyncio.Future[tuple[_T, ...]]], streams: Sequence[AsyncGenerator[_T, None]]
) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)
