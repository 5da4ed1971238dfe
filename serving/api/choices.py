"""Follows the generation of each choice, step by step, into deltas. Knows no reply shape."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import TypeVar

from engine.errors import GrammarError, RequestAbortedError, TandemError
from engine.types import FinishReason, GenerateOutput
from serving.api.choice_text import ChoiceText, Delta
from serving.api.plan import Plan
from serving.api.tokenizer import Tokenizer
from serving.generator import Generator

_T = TypeVar("_T")
PlaceOf = Callable[[], AbstractAsyncContextManager[None]]


class EndedEarlyError(TandemError):
    """A generator's stream ended, or an output said `error`, before the request was finished."""


async def follow_choice(
    generator: Generator, plan: Plan, index: int, *, tokenizer: Tokenizer, place: PlaceOf
) -> AsyncGenerator[Delta, None]:
    """Deltas of choice `index`; the last one has a finish reason. `aclose` cancels the generation.

    Raises what the generator raises, and EndedEarlyError or RequestAbortedError when it did not
    finish.
    """
    text = ChoiceText(plan, index, tokenizer)
    finished = False
    async with place(), _generating(generator, plan, index) as outputs:
        async for output in outputs:
            if output.finish_reason is FinishReason.ABORT:
                raise RequestAbortedError("the request was aborted on the node: send it again")
            if output.finish_reason is FinishReason.ERROR:
                raise EndedEarlyError("the engine could not finish the request")
            delta = text.take(output)
            yield delta
            finished = delta.finish_reason is not None
            # A stop string ended the text; leaving the block cancels the generation.
            if finished and output.finish_reason is None:
                return
    if not finished:
        raise EndedEarlyError(f"request {plan.id} ended without a finish reason")


@asynccontextmanager
async def _generating(
    generator: Generator, plan: Plan, index: int
) -> AsyncIterator[AsyncIterator[GenerateOutput]]:
    """The outputs of choice `index`; a grammar that is refused is named as the caller does."""
    try:
        async with aclosing(generator.generate(plan.requests[index])) as outputs:
            yield outputs
    except GrammarError as error:
        error.param = plan.grammar_param
        raise


def follow(
    generator: Generator, plan: Plan, tokenizer: Tokenizer, *, place: PlaceOf = nullcontext
) -> AsyncGenerator[Delta, None]:
    """Deltas of all choices of a plan, as they come; each is generated inside a `place`."""
    indices = range(len(plan.requests))
    streams = [
        follow_choice(generator, plan, index, tokenizer=tokenizer, place=place) for index in indices
    ]
    return streams[0] if len(streams) == 1 else merge(streams)


async def merge(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Items of all streams as they come, at most one ahead each; the first error ends all."""
    # One task for each stream that has not ended, the one that was read last at the end.
    reading = {_read(stream): stream for stream in streams}
    try:
        while reading:
            task = next((task for task in reading if task.done()), None)
            if task is None:
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                continue
            stream = reading.pop(task)
            for item in task.result():
                yield item
                reading[_read(stream)] = stream
    finally:
        # Tasks end before their streams are closed: a generator that runs cannot be closed.
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)


def _read(stream: AsyncGenerator[_T, None]) -> asyncio.Task[tuple[_T, ...]]:
    """A task that ends with the next item alone, or with nothing when the stream has ended."""

    async def read() -> tuple[_T, ...]:
        async for item in stream:
            return (item,)
        return ()

    return asyncio.create_task(read())
