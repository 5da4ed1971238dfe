"""A relay before a server that makes its model think, call a tool, and then think and answer.

Agents' frameworks send their own keys alone. The relay adds a grammar to each request, by which a
model of random weights writes as a trained one would: a call first, and an answer once a tool's
result is in the request.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

RESULT = "sunny and 21 degrees"
"""In what the tool returns, and so in every request after the call."""

CALL = (
    r"[a-f]{3} [a-f]{3}\n</think>\n\n"
    r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Rome|Oslo)"\}\}\n</tool_call>'
)
ANSWER = r"[a-f]{4}\n</think>\n\nIt is (sunny|warm) in [a-z]{4}\."


@asynccontextmanager
async def relay_to(url: str) -> AsyncIterator[str]:
    """Address of a relay to the server at `url`."""
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        pattern = ANSWER if RESULT in json.dumps(body) else CALL
        body |= {"structured_outputs": {"regex": pattern}, "temperature": 0}
        kept = {
            it: request.headers[it]
            for it in ("Authorization", "x-api-key")
            if it in request.headers
        }
        async with session.post(url + request.path, json=body, headers=kept) as reply:
            answer = web.StreamResponse(status=reply.status)
            answer.content_type = reply.content_type
            await answer.prepare(request)
            async for piece in reply.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer

    app = web.Application()
    app.router.add_post("/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await session.close()
