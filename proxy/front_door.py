"""What HTTP clients meet before the model is known, and the switch to the real app once it is."""

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.operations import HEALTH_PATHS, metrics_response
from engine.errors import TandemError, UnavailableError
from engine.http.errors import on_http_error, on_tandem_error


class FrontDoor:
    """An ASGI app that is alive but not ready until `open` gives it the app to serve."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._app: ASGIApp = _waiting_app(registry)

    def open(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _waiting_app(registry: CollectorRegistry) -> Starlette:
    async def metrics(request: Request) -> Response:
        return await metrics_response(registry)

    methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]
    return Starlette(
        routes=[
            *(Route(path, _alive) for path in HEALTH_PATHS),
            Route("/metrics", metrics),
            Route("/{path:path}", _not_yet, methods=methods),
        ],
        exception_handlers={TandemError: on_tandem_error, HTTPException: on_http_error},
    )


async def _alive(request: Request) -> Response:
    return Response()


async def _not_yet(request: Request) -> Response:
    raise UnavailableError("no node has answered yet, so the model is not known")
