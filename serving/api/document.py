"""GET /openapi.json and GET /docs: what a server serves, for programs and for people."""

import asyncio
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.api.docs_page import docs_page
from serving.api.openapi import openapi
from serving.api.serving import Serving

DOCUMENT_PATHS: Final = ("/openapi.json", "/docs")
_HEADERS: Final = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Document:
    """The document of one app; made when somebody first asks, since few do."""

    def __init__(
        self, serving: Serving, served: Sequence[Route], open_paths: Collection[str] | None
    ) -> None:
        self._serving = serving
        self._served = served
        self._open_paths = open_paths

    def routes(self) -> list[Route]:
        handlers = (self.openapi, self.docs)
        return [Route(path, it) for path, it in zip(DOCUMENT_PATHS, handlers, strict=True)]

    async def openapi(self, request: Request) -> Response:
        made = await asyncio.to_thread(lambda: self._openapi)
        return Response(msgspec.json.encode(made), media_type="application/json")

    async def docs(self, request: Request) -> Response:
        page = await asyncio.to_thread(lambda: docs_page(self._openapi))
        return Response(page, headers=_HEADERS, media_type="text/html")

    @cached_property
    def _openapi(self) -> dict[str, Any]:
        routes = [*self._served, *self.routes()]
        return openapi(self._serving, routes, open_paths=self._open_paths)
