"""Middleware for every HTTP request: checks the API key and echoes the request id."""

import re
import uuid
from collections.abc import Collection
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import AuthenticationError, OverloadedError
from serving.http.callers import Callers, remember, remember_label
from serving.http.errors import error_response, is_anthropic, preflight_hint

MAX_REQUEST_ID_CHARS = 128
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class BearerAuth:
    """Refuses requests without a known key, and those beyond the caller's limits.

    `open_paths` need no key and count for nobody. Whatever a caller is told about its limits stands
    in the headers of every reply.
    """

    def __init__(self, app: ASGIApp, callers: Callers, open_paths: Collection[str]) -> None:
        self._app = app
        self._callers = callers
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = _key_of(headers)
        caller = self._callers.find(key) if key else None
        if caller is None:
            message = "missing or wrong key: send Authorization: Bearer <key>, or x-api-key: <key>"
            error = AuthenticationError(message + preflight_hint(headers))
            await error_response(error, scope)(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(caller.headers())
            await send(message)

        remember(scope, caller)
        with ExitStack() as stack:
            # Asking costs next to nothing; only what brings a body makes the server work.
            if scope["method"] == "POST":
                try:
                    stack.enter_context(caller.entering())
                except OverloadedError as error:
                    await error_response(error, scope)(scope, receive, send_with_limits)
                    return
            await self._app(scope, receive, send_with_limits)


def _key_of(headers: Headers) -> bytes:
    """The key that a request brings: OpenAI's header before Anthropic's; empty for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if not scheme:
        key = headers.get("x-api-key", "")
    elif scheme.lower() != "bearer":
        key = ""
    # Headers arrive as Latin-1, keys are UTF-8: the last byte of "à" is no space of the header.
    return key.strip(" \t").encode("latin-1")


class RequestIdEcho:
    """Puts X-Request-Id on every response: the caller's label, cleaned, or a fresh one.

    Anthropic's clients read it as Request-Id.

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
        remember_label(scope, label)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = label
                if is_anthropic(scope["path"]):
                    headers["request-id"] = label
            await send(message)

        await self._app(scope, receive, send_with_id)
