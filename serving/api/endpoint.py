"""The generating endpoints: decode and plan, generate, reply whole or as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import GrammarError, RequestAbortedError, TandemError
from engine.types import FinishReason, GenerateOutput
from serving.api.access import Admission
from serving.api.choice_text import ChoiceText, Delta, joined
from serving.api.plan import Plan
from serving.api.served_model import ServedModel, max_body_bytes
from serving.api.streams import KEEP_ALIVE, ReplyFormat, UsageCounter, next_of, with_pauses
from serving.api.tokenizer import Tokenizer
from serving.generator import Generator
from serving.http.callers import Caller, caller_of, holder_of
from serving.http.request_bodies import RequestBodies, run_while_connected

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
    reading = {asyncio.create_task(next_of(stream)): stream for stream in streams}
    try:
        while reading:
            task = next((task for task in reading if task.done()), None)
            if task is None:
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                continue
            stream = reading.pop(task)
            for item in task.result():
                yield item
                reading[asyncio.create_task(next_of(stream))] = stream
    finally:
        # Tasks end before their streams are closed: a generator that runs cannot be closed.
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)


LONG_REPLY: Final = 4096  # tokens, or values of log-probabilities: 10 ms

_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


Planner = Callable[[bytes, ServedModel, Caller], Plan]


class GenerateEndpoint:
    """ASGI app of one path that generates.

    `plan` reads a request's body, in a thread, and raises InvalidRequestError leaves. `num_open`:
    requests from their first byte to the last one of their reply.
    """

    def __init__(
        self,
        generator: Generator,
        served: ServedModel,
        reply_format: ReplyFormat,
        *,
        plan: Planner,
        bodies: RequestBodies,
        admission: Admission,
    ) -> None:
        self._generator = generator
        self._admission = admission
        self._tokenizer = served.tokenizer
        self._format = reply_format
        self._plan = plan
        self._served = served
        self._bodies = bodies
        self._max_bytes = max_body_bytes(served, num_prompts=reply_format.max_prompts)
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_open += 1
        try:
            caller = caller_of(scope)
            plan = await self._bodies.process(
                scope,
                receive,
                lambda body: self._plan(body, self._served, caller),
                max_bytes=self._max_bytes,
            )
            with suppress(ClientDisconnect):
                await run_while_connected(receive, self._serve(plan, scope, receive, send=send))
        finally:
            self.num_open -= 1

    async def _serve(self, plan: Plan, scope: Scope, receive: Receive, *, send: Send) -> None:
        async with self._admission.admitting(plan, holder_of(scope)) as admitted:
            deltas_of = follow(self._generator, plan, self._tokenizer, place=admitted.place)
            stream = admitted.counted(deltas_of)
            async with aclosing(stream) as deltas:
                if not plan.stream:
                    response = await self._whole(plan, deltas)
                    await response(scope, receive, send)
                    return
                interval_s = self._served.sse_keep_alive_interval
                async with aclosing(with_pauses(deltas, interval_s)) as paused:
                    await self._stream(plan, paused, send)

    async def _whole(self, plan: Plan, deltas: AsyncIterator[Delta]) -> Response:
        counter = UsageCounter(plan)
        choices: list[list[Delta]] = [[] for _ in plan.requests]
        async for delta in deltas:
            counter.add(delta)
            choices[delta.index].append(delta)

        def encode() -> bytes:
            reply = self._format.reply(plan, list(map(joined, choices)), counter)
            return msgspec.json.encode(reply)

        # Log-probabilities of prompts and of long answers would keep all other requests waiting.
        num_values = sum(map(len, choices)) * (1 + (plan.requests[0].sampling.logprobs or 0))
        is_long = num_values > LONG_REPLY or any(it[0].prompt_logprobs for it in choices)
        content = await asyncio.to_thread(encode) if is_long else encode()
        return Response(content, media_type="application/json")

    async def _stream(self, plan: Plan, deltas: AsyncIterator[Delta | None], send: Send) -> None:
        """Send the events of all deltas, then those that end the stream.

        None is a pause. An error before the first event or pause becomes an HTTP status; a later
        one is the last event.
        """
        counter = UsageCounter(plan)
        writer = self._format.stream(plan, counter)
        is_started = False
        try:
            async for delta in deltas:
                # Only now: an error of admission or prefill gets its own status.
                if not is_started and (delta is None or _is_shown(plan, delta)):
                    is_started = True
                    start = {"type": "http.response.start", "status": 200}
                    await send({**start, "headers": _STREAM_HEADERS})
                if delta is None:
                    await _send_body(send, KEEP_ALIVE)
                    continue
                counter.add(delta)
                if not _is_shown(plan, delta):
                    continue
                is_long = delta.prompt_logprobs is not None
                encode = partial(writer.delta, delta)
                await _send_body(send, await asyncio.to_thread(encode) if is_long else encode())
            end = writer.end()
        except TandemError as error:
            if not is_started:
                raise
            end = writer.failed(error)
        await _send_body(send, end, more=False)


def _is_shown(plan: Plan, delta: Delta) -> bool:
    """Whether a step gets a chunk: any with tokens does, but for pieces of tool calls.

    Its text may be empty, as that of a special token, of half a character, or of what may begin a
    stop string: clients take the time between chunks for the time between tokens.
    """
    has_news = (
        delta.text or delta.reasoning or delta.tool_calls or delta.logprobs or delta.finish_reason
    )
    shows_tokens = delta.token_ids and (plan.tool_calls is None or plan.return_token_ids)
    return bool(has_news or shows_tokens or delta.prompt_logprobs)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    if more and not body:
        return
    await send({"type": "http.response.body", "body": body, "more_body": more})
