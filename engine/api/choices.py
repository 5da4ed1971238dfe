"""Follows the generation of each choice, step by step, into deltas. Knows no reply shape."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from engine.api.detokenizer import Detokenizer
from engine.api.plan import Plan
from engine.api.stop import StopMatcher
from engine.api.tokenizer import Tokenizer
from engine.errors import RequestAbortedError, TandemError
from engine.generator import Generator
from engine.types import (
    FinishReason,
    GenerateOutput,
    KVTransferParams,
    KVTransferStats,
    TokenId,
    TokenLogprob,
)

_T = TypeVar("_T")
_Waiting = dict[asyncio.Future[tuple[_T, ...]], AsyncGenerator[_T, None]]


class EndedEarlyError(TandemError):
    """A generator's stream ended, or an output said `error`, before the request was finished."""


@dataclass(slots=True, frozen=True)
class Delta:
    """News of one choice. `text_offset` is where `text` begins in the choice's whole text."""

    index: int
    text: str
    text_offset: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None = None
    stop_reason: TokenId | str | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: KVTransferParams | None = None
    kv_transfer: KVTransferStats | None = None


@dataclass(slots=True, frozen=True)
class _Read:
    """A step's tokens as text, how many were used, and the stop string that cut them."""

    text: str
    used: int
    matched: str | None


class ChoiceText:
    """Text side of one choice: detokenizes, looks for stop strings, counts."""

    def __init__(self, plan: Plan, index: int, tokenizer: Tokenizer) -> None:
        decode = partial(tokenizer.decode, skip_special_tokens=plan.text.skip_special_tokens)
        self._index = index
        self._show_stop = plan.text.include_stop
        self._wants_logprobs = plan.requests[index].sampling.logprobs is not None
        self._min_tokens = plan.requests[index].sampling.min_tokens
        self._detokenizer = Detokenizer(decode, plan.prompt_of(index))
        self._matcher = StopMatcher(plan.text.stop, include=plan.text.include_stop)
        self._num_tokens = 0
        self._num_chars = 0

    def take(self, output: GenerateOutput) -> Delta:
        """Delta of one output; a stop string ends the choice although the output does not."""
        read = self._read(output)
        offset, self._num_chars = self._num_chars, self._num_chars + len(read.text)
        cut = read.matched is not None
        logprobs = (output.logprobs or ()) if self._wants_logprobs else ()
        return Delta(
            index=self._index,
            text=read.text,
            text_offset=offset,
            token_ids=output.token_ids[: read.used],
            logprobs=logprobs[: read.used],
            finish_reason=FinishReason.STOP if cut else output.finish_reason,
            stop_reason=read.matched if cut else output.stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
            kv_transfer=output.kv_transfer,
        )

    def _read(self, output: GenerateOutput) -> _Read:
        pieces: list[str] = []
        for used, token_id in enumerate(self._spoken(output), start=1):
            self._num_tokens += 1
            fed = self._matcher.feed(self._detokenizer.push(token_id), armed=self._armed)
            pieces.append(fed.text)
            if fed.matched is not None:
                return _Read("".join(pieces), used, fed.matched)
        matched = None
        if output.finish_reason is not None:
            fed = self._matcher.feed(self._detokenizer.flush(), armed=self._armed)
            pieces.append(fed.text + self._matcher.flush())
            matched = fed.matched
        return _Read("".join(pieces), len(output.token_ids), matched)

    @property
    def _armed(self) -> bool:
        return self._num_tokens > self._min_tokens

    def _spoken(self, output: GenerateOutput) -> Sequence[TokenId]:
        """The tokens that show in the text: all but the one that stopped the choice."""
        if output.finish_reason is FinishReason.STOP and not self._show_stop:
            return output.token_ids[:-1]
        return output.token_ids


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
