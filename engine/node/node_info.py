"""GET /node_info: where a proxy that knows only a node's HTTP port finds the token streams.

Stands before the API and its key: it tells no more than a scan of the ports would.
"""

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.errors import on_http_error

PATH = "/node_info"


def with_node_info(api: ASGIApp, info: Mapping[str, object]) -> ASGIApp:
    """`api` and, at `PATH`, `info` as JSON, for everybody."""

    async def answer(request: Request) -> Response:
        return JSONResponse(dict(info))

    door = Starlette(
        routes=[Route(PATH, answer)],
        exception_handlers={HTTPException: on_http_error},
    )

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        app = door if scope["type"] == "http" and scope["path"] == PATH else api
        await app(scope, receive, send)

    return choose
