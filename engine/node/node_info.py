"""GET /node_info: where a proxy that knows only a node's HTTP port finds the token streams.

Stands before the API, because a proxy shows the cluster token where clients show the API key.
"""

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.middleware import BearerAuth

PATH = "/node_info"


def with_node_info(api: ASGIApp, info: Mapping[str, object], cluster_token: str | None) -> ASGIApp:
    """`api` and, at `PATH`, `info` as JSON; a cluster token, if there is one, guards it."""

    async def answer(request: Request) -> Response:
        return JSONResponse(dict(info))

    guard = [] if cluster_token is None else [Middleware(BearerAuth, api_key=cluster_token)]
    door = Starlette(routes=[Route(PATH, answer)], middleware=guard)

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        app = door if scope["type"] == "http" and scope["path"] == PATH else api
        await app(scope, receive, send)

    return choose
