"""The least that a proxy in front of language models does: `python -m ... UPSTREAM_URL`.

Starlette on uvicorn (httptools, uvloop), one aiohttp session. It parses the body, since whoever
routes by prompts must, sends the same bytes on, and passes the answer on chunk by chunk.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
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


def make_app(upstream: str) -> Starlette:
    """The proxy in front of the server at `upstream`."""
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        async with aiohttp.ClientSession(upstream, connector=connector) as session:
            sessions.append(session)
            yield

    async def forward(request: Request) -> Response:
        asked = await request.json()
        call = sessions[0].post(PATH, data=await request.body(), headers={"Content-Type": JSON})
        if asked.get("stream"):
            return StreamingResponse(_chunks(call), media_type="text/event-stream")
        async with call as reply:
            return Response(await reply.read(), reply.status, media_type=JSON)

    return Starlette(routes=[Route(PATH, forward, methods=["POST"])], lifespan=lifespan)


async def _chunks(call: "aiohttp.client._RequestContextManager") -> AsyncIterator[bytes]:
    async with call as reply:
        async for chunk in reply.content.iter_any():
            yield chunk


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(make_app(sys.argv[1])))
