"""What happens to every HTTP request: the key is checked and the request id echoed.

Knows no endpoint.
"""

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.errors import error_response
from engine.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/metrics"})
MAX_REQUEST_ID_CHARS = 128
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class BearerAuth:
    """Lets only callers with the key in, except to probes and metrics.

    The compare takes constant time.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("missing or wrong key: send Authorization: Bearer <key>")
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers arrive as Latin-1, keys are UTF-8.
        given = key.strip().encode("latin-1")
        return hmac.compare_digest(given, self._expected) and scheme.lower() == "bearer"


class RequestIdEcho:
    """Puts X-Request-Id on every response: the caller's label, made harmless, or a fresh one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = clean_label(Headers(scope=scope).get("x-request-id", "")) or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = label
            await send(message)

        await self._app(scope, receive, send_with_id)


def clean_label(label: str) -> str:
    """At most 128 printable ASCII characters; every other character becomes an underscore."""
    return _UNPRINTABLE.sub("_", label[:MAX_REQUEST_ID_CHARS])
