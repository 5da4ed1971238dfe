"""Errors as OpenAI clients read them: status, `{"error": {...}}`, Retry-After."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine import errors
from engine.errors import TandemError

MAX_MESSAGE_CHARS = 2000
MAX_PATH_CHARS = 200

# The first class that an error is an instance of decides.
_STATUSES: tuple[tuple[type[TandemError], int, str], ...] = (
    (errors.UnknownModelError, 404, "not_found_error"),
    (errors.InvalidRequestError, 400, "invalid_request_error"),
    (errors.AuthenticationError, 401, "authentication_error"),
    (errors.ForbiddenError, 403, "permission_error"),
    (errors.OverloadedError, 429, "rate_limit_error"),
    (errors.UnavailableError, 503, "service_unavailable_error"),
    (errors.RequestAbortedError, 503, "service_unavailable_error"),
    (errors.DeadlineExceededError, 504, "timeout_error"),
    (errors.KVLoadError, 502, "upstream_error"),
    (errors.TransportError, 502, "upstream_error"),
    (TandemError, 500, "server_error"),
)


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """`param` names the wrong key; `code` is the HTTP status where there is no better one."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error."""

    error: ErrorDetail


def error_body(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    *,
    param: str | None = None,
    code: str | None = None,
) -> bytes:
    """JSON of an error."""
    detail = ErrorDetail(message=message, type=kind, param=param, code=code or status)
    return msgspec.json.encode(ErrorReply(error=detail))


def status_and_body(error: TandemError) -> tuple[int, bytes]:
    """HTTP status and JSON body of an error."""
    status, kind = next((status, kind) for cls, status, kind in _STATUSES if isinstance(error, cls))
    message = str(error)[:MAX_MESSAGE_CHARS]
    if isinstance(error, errors.InvalidRequestError):
        return status, error_body(status, message, kind, param=error.param, code=error.code)
    return status, error_body(status, message, kind)


def error_response(error: TandemError) -> Response:
    """Response for an error that came before any other byte was sent."""
    headers = {}
    if isinstance(error, errors.OverloadedError | errors.UnavailableError):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, errors.RequestAbortedError):
        headers["retry-after"] = "1"
    if isinstance(error, errors.AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    status, body = status_and_body(error)
    return Response(body, status, headers, media_type="application/json")


async def on_tandem_error(request: Request, error: Exception) -> Response:
    """Starlette handler for every TandemError."""
    assert isinstance(error, TandemError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler for wrong paths and methods, and for bodies refused unparsed."""
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, error.detail)
    asked = f"{request.method} {request.url.path[:MAX_PATH_CHARS]}"
    if error.status_code == 404:
        served = sorted({it.path for it in request.app.routes if isinstance(it, Route)})
        message = f"{asked} is not served here; what is: {', '.join(served)}"
        body = error_body(404, message, "not_found_error")
    elif error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "another method")
        body = error_body(405, f"{asked}: Method Not Allowed, use {methods}")
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Starlette handler for a client that left while it sent its body; nobody reads this reply."""
    return Response(status_code=499)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Starlette handler for bugs: the client learns nothing, the server logs the traceback."""
    body = error_body(500, "internal error", "server_error")
    return Response(body, 500, media_type="application/json")


ERROR_HANDLERS: Final[Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]] = {
    TandemError: on_tandem_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    Exception: on_unexpected,
}
"""For the apps: Starlette's own handlers answer in plain text."""
