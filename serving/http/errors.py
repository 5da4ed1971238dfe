"""Errors as clients read them: status, body and Retry-After; Anthropic's body under its paths."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from engine import errors
from engine.errors import TandemError
from serving.http.callers import is_anthropic, label_of

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

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """`param` names the wrong key; `code` is the HTTP status where there is no better one."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error, but for those of Anthropic's protocol."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The message names the wrong key itself."""

    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error of Anthropic's protocol, and its error event."""

    error: AnthropicErrorDetail
    request_id: str | None
    type: str = "error"


def anthropic_error(status: int, message: str, request_id: str | None = None) -> bytes:
    """JSON of an error in Anthropic's shape; its type follows from the status."""
    kind = "invalid_request_error" if status < 500 else "api_error"
    detail = AnthropicErrorDetail(type=_ANTHROPIC_TYPES.get(status, kind), message=message)
    return msgspec.json.encode(AnthropicErrorReply(error=detail, request_id=request_id))


def anthropic_failure(error: TandemError) -> bytes:
    """JSON of an error that ends a stream of Anthropic's protocol."""
    return anthropic_error(status_and_body(error)[0], str(error)[:MAX_MESSAGE_CHARS])


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


def error_response(error: TandemError, scope: Scope) -> Response:
    """Response for an error that came before any other byte was sent."""
    headers = {}
    if isinstance(error, errors.OverloadedError | errors.UnavailableError):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, errors.RequestAbortedError):
        headers["retry-after"] = "1"
    if isinstance(error, errors.AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    status, body = status_and_body(error)
    message = str(error)[:MAX_MESSAGE_CHARS]
    return _response(scope, status, message, body=body, headers=headers)


def _response(
    scope: Scope,
    status: int,
    message: str,
    *,
    body: bytes,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error as the clients of this path read it; `body` is OpenAI's."""
    if is_anthropic(scope["path"]):
        body = anthropic_error(status, message, label_of(scope) or None)
    return Response(body, status, headers, media_type="application/json")


async def on_tandem_error(request: Request, error: Exception) -> Response:
    """Starlette handler for every TandemError."""
    assert isinstance(error, TandemError)
    return error_response(error, request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler for wrong paths and methods, and for bodies refused unparsed."""
    assert isinstance(error, HTTPException)
    status, message, kind = error.status_code, error.detail, "invalid_request_error"
    asked = f"{request.method} {request.url.path[:MAX_PATH_CHARS]}"
    if status == 404:
        served = sorted({it.path for it in request.app.routes if isinstance(it, Route)})
        message = f"{asked} is not served here; what is: {', '.join(served)}"
        kind = "not_found_error"
    elif status == 405:
        methods = (error.headers or {}).get("Allow", "another method")
        message = f"{asked}: Method Not Allowed, use {methods}"
        message += preflight_hint(request.headers)
    body = error_body(status, message, kind)
    return _response(request.scope, status, message, body=body, headers=error.headers)


def preflight_hint(headers: Mapping[str, str]) -> str:
    """Advice for a browser that asks before a page's script does; else nothing."""
    if "access-control-request-method" not in headers:
        return ""
    return "; scripts of web pages may ask only from origins named by --allowed-origins"


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Starlette handler for a client that left while it sent its body; nobody reads this reply."""
    return Response(status_code=499)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Starlette handler for bugs: the client learns nothing, the server logs the traceback."""
    body = error_body(500, "internal error", "server_error")
    return _response(request.scope, 500, "internal error", body=body)


ERROR_HANDLERS: Final[Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]] = {
    TandemError: on_tandem_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    Exception: on_unexpected,
}
"""For the apps: Starlette's own handlers answer in plain text."""
