"""The two generating endpoints as one ASGI app over a shape: parse, generate, reply.

Knows no reply shape.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.api.choices import Delta, follow
from engine.api.json_body import parse_object
from engine.api.kv_params import parse_kv_transfer_params
from engine.api.plan import Plan
from engine.api.serving import Serving, max_body_bytes
from engine.api.shape import Shape
from engine.api.sse import error_event, events
from engine.api.tally import ReplyTally
from engine.api.unsupported import without_neutral
from engine.errors import TandemError
from engine.generator import Generator
from engine.http.request_bodies import RequestBodies, run_while_connected

SEND_TIMEOUT_S = 300.0

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerateEndpoint:
    """Serves one of /v1/completions and /v1/chat/completions.

    With `accept_kv_transfer_params` false (a proxy) what clients send under that key is thrown away
    unread.
    """

    def __init__(
        self,
        generator: Generator,
        serving: Serving,
        shape: Shape,
        *,
        bodies: RequestBodies,
        accept_kv_transfer_params: bool,
    ) -> None:
        self._generator = generator
        self._serving = serving
        self._shape = shape
        self._bodies = bodies
        self._max_bytes = max_body_bytes(serving, num_prompts=shape.max_prompts)
        self._accept_kv_transfer_params = accept_kv_transfer_params

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = await self._bodies.process(scope, receive, self._plan, max_bytes=self._max_bytes)
        with suppress(ClientDisconnect):
            await run_while_connected(receive, self._serve(plan, scope, receive, send=send))

    async def _serve(self, plan: Plan, scope: Scope, receive: Receive, *, send: Send) -> None:
        async with aclosing(follow(self._generator, plan, self._serving.tokenizer)) as deltas:
            if plan.stream:
                await self._stream(plan, deltas, send)
            else:
                response = await self._whole(plan, deltas)
                await response(scope, receive, send)

    def _plan(self, body: bytes) -> Plan:
        fields = parse_object(body, self._serving.max_model_len)
        kv_params = fields.pop("kv_transfer_params", None)
        if not self._accept_kv_transfer_params:
            kv_params = None
        fields = without_neutral(fields)
        return self._shape.plan(fields, parse_kv_transfer_params(kv_params), self._serving)

    async def _whole(self, plan: Plan, deltas: AsyncGenerator[Delta, None]) -> Response:
        tally = ReplyTally(plan)
        async for delta in deltas:
            tally.add(delta)
        content = msgspec.json.encode(self._shape.reply(plan, tally))
        return Response(content, media_type="application/json")

    async def _stream(self, plan: Plan, deltas: AsyncGenerator[Delta, None], send: Send) -> None:
        """Send events as they come; an error before the first one still becomes an HTTP status."""
        async with aclosing(events(self._shape, plan, deltas)) as stream:
            first = await anext(stream)
            await _send_start(send)
            await _send_body(send, first)
            await _send_rest(send, stream)
        await _send_body(send, b"", more=False)


async def _send_rest(send: Send, stream: AsyncGenerator[bytes, None]) -> None:
    """Once a byte is out, an error can only be told as the stream's last event."""
    try:
        async for event in stream:
            await _send_body(send, event)
    except TandemError as error:
        await _send_body(send, error_event(error))


async def _send_start(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send one piece; TimeoutError cuts a reader off that takes none for `SEND_TIMEOUT_S`."""
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": body, "more_body": more})
