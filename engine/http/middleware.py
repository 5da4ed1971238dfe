"""Middleware for every HTTP request: checks the API key and echoes the request id."""

import hmac
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import AuthenticationError
from engine.http.errors import error_response

MAX_REQUEST_ID_CHARS = 128
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class BearerAuth:
    """Refuses callers without the key, except on `open_paths`; compares in constant time."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._expected = api_key.encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("missing or wrong key: send Authorization: Bearer <key>")
        await error_response(error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers arrive as Latin-1, keys are UTF-8.
        given = key.strip().encode("latin-1")
        return hmac.compare_digest(given, self._expected) and scheme.lower() == "bearer"


class RequestIdEcho:
    """Puts X-Request-Id on every response: the caller's label, cleaned, or a fresh one.

    A label is cut to 128 characters; an underscore replaces all that is not printable ASCII.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        label = _UNPRINTABLE.sub("_", sent[:MAX_REQUEST_ID_CHARS]) or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = label
            await send(message)

        await self._app(scope, receive, send_with_id)
