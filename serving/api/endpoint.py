"""The generating endpoints: decode and plan, generate, reply whole or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import TandemError
from serving.api.access import Admission
from serving.api.choice_text import Delta, joined
from serving.api.choices import follow
from serving.api.keep_alive import KEEP_ALIVE, with_pauses
from serving.api.plan import Plan, named, of_origin
from serving.api.serving import Serving, max_body_bytes
from serving.api.streams import ReplyFormat
from serving.api.usage import UsageCounter
from serving.generator import Generator
from serving.http.callers import caller_of, origin_of
from serving.http.request_bodies import RequestBodies, run_while_connected

LONG_REPLY: Final = 4096  # tokens, or values of log-probabilities: 10 ms

_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


Planner = Callable[[bytes, Serving, str | None], Plan]


class GenerateEndpoint:
    """ASGI app of one path that generates.

    `plan` reads a request's body, in a thread, and raises InvalidRequestError leaves; its last
    argument is the header X-Session-ID.
    """

    def __init__(
        self,
        generator: Generator,
        serving: Serving,
        reply_format: ReplyFormat,
        *,
        plan: Planner,
        bodies: RequestBodies,
        admission: Admission,
    ) -> None:
        self._generator = generator
        self._admission = admission
        self._tokenizer = serving.tokenizer
        self._format = reply_format
        self._plan = plan
        self._serving = serving
        self._bodies = bodies
        self._max_bytes = max_body_bytes(serving, num_prompts=reply_format.max_prompts)
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Requests from their first byte to the last one of their reply."""
        return self._num_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_open += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._num_open -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id = Headers(scope=scope).get("x-session-id")
        plan = await self._bodies.process(
            scope,
            receive,
            lambda body: self._plan(body, self._serving, session_id),
            max_bytes=self._max_bytes,
        )
        origin = origin_of(scope)
        plan = named(of_origin(plan, origin), self._format.id_prefix, origin.label)
        with suppress(ClientDisconnect):
            await run_while_connected(receive, self._serve(plan, scope, receive, send=send))

    async def _serve(self, plan: Plan, scope: Scope, receive: Receive, *, send: Send) -> None:
        async with self._admission.admitting(plan, caller_of(scope)) as admitted:
            plan = admitted.plan
            deltas_of = follow(self._generator, plan, self._tokenizer, place=admitted.place)
            stream = admitted.counted(deltas_of)
            async with aclosing(stream) as deltas:
                if not plan.stream:
                    response = await self._whole(plan, deltas)
                    await response(scope, receive, send)
                    return
                interval_s = self._serving.sse_keep_alive_interval
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
