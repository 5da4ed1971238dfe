"""The least that a proxy in front of language models does: `python -m ... UPSTREAM_URL [P_URL]`.

Starlette on uvicorn (httptools, uvloop), one aiohttp session. It parses the body, since whoever
routes by prompts must, sends the same bytes on, and passes the answer on chunk by chunk.

With `P_URL` it sends two, as vLLM's workers want it: that server gets the body first, for one
token, and the upstream, a D then, the body with the transfer parameters that came of it.
"""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.serving.proxy_cost.loopback import serve

PATH = "/v1/completions"
JSON = "application/json"
# Below the 5 s after which uvicorn closes idle connections.
KEEPALIVE_S = 2.0
# To P: keep the cache of this prompt for a D.
ASK_P = {"do_remote_decode": True, "do_remote_prefill": False}


def make_app(upstream: str, prefill: str | None = None) -> Starlette:
    """The proxy in front of the server at `upstream`, or of two: `prefill` is a P then."""
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        async with aiohttp.ClientSession(connector=connector) as session:
            sessions.append(session)
            yield

    async def forward(request: Request) -> Response:
        asked = await request.json()
        body, headers = await request.body(), {"Content-Type": JSON}
        if prefill is not None:
            headers["X-Request-Id"] = uuid.uuid4().hex
            first = sessions[0].post(prefill + PATH, data=_for_p(asked), headers=headers)
            body = _for_d(asked, await _answer(first))
        call = sessions[0].post(upstream + PATH, data=body, headers=headers)
        if asked.get("stream"):
            return StreamingResponse(_chunks(call), media_type="text/event-stream")
        async with call as reply:
            return Response(await reply.read(), reply.status, media_type=JSON)

    return Starlette(routes=[Route(PATH, forward, methods=["POST"])], lifespan=lifespan)


def _for_p(asked: dict[str, Any]) -> bytes:
    own = {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_P}
    return msgspec.json.encode(asked | own)


def _for_d(asked: dict[str, Any], answer: bytes) -> bytes:
    params = msgspec.json.decode(answer)["kv_transfer_params"]
    return msgspec.json.encode(asked | {"kv_transfer_params": params})


async def _answer(call: "aiohttp.client._RequestContextManager") -> bytes:
    async with call as reply:
        reply.raise_for_status()
        return await reply.read()


async def _chunks(call: "aiohttp.client._RequestContextManager") -> AsyncIterator[bytes]:
    async with call as reply:
        async for chunk in reply.content.iter_any():
            yield chunk


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(make_app(*sys.argv[1:])))
