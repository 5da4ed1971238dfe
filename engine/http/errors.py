"""Errors as OpenAI clients read them: status, `{"error": {...}}`, Retry-After.

Knows nothing of who raised them.
"""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine import errors
from engine.errors import TandemError

MAX_MESSAGE_CHARS = 2000

# The first class that an error is an instance of decides.
_STATUSES: tuple[tuple[type[TandemError], int, str], ...] = (
    (errors.UnknownModelError, 404, "not_found_error"),
    (errors.InvalidRequestError, 400, "invalid_request_error"),
    (errors.AuthenticationError, 401, "authentication_error"),
    (errors.OverloadedError, 429, "rate_limit_error"),
    (errors.UnavailableError, 503, "service_unavailable_error"),
    (errors.RequestAbortedError, 503, "service_unavailable_error"),
    (errors.DeadlineExceededError, 504, "timeout_error"),
    (errors.KVLoadError, 502, "upstream_error"),
    (errors.TransportError, 502, "upstream_error"),
    (TandemError, 500, "server_error"),
)


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `error`; `code` is the HTTP status where there is no better one."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorReply(msgspec.Struct, frozen=True):
    """The whole JSON body of a failed request, and the data of a failed stream's last event."""

    error: ErrorBody


def status_of(error: TandemError) -> int:
    """HTTP status of an error."""
    return _classify(error)[0]


def reply_of(error: TandemError) -> ErrorReply:
    """The body that a client reads."""
    status, kind = _classify(error)
    invalid = error if isinstance(error, errors.InvalidRequestError) else None
    return ErrorReply(
        ErrorBody(
            message=str(error)[:MAX_MESSAGE_CHARS],
            type=kind,
            param=invalid.param if invalid else None,
            code=(invalid.code if invalid else None) or status,
        )
    )


def error_response(error: TandemError) -> Response:
    """Response for an error that came before any other byte was sent."""
    headers = {}
    if isinstance(error, errors.OverloadedError | errors.UnavailableError):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, errors.RequestAbortedError):
        headers["retry-after"] = "1"
    if isinstance(error, errors.AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return _json(reply_of(error), status_of(error), headers)


async def on_tandem_error(request: Request, error: Exception) -> Response:
    """Starlette handler for every TandemError."""
    assert isinstance(error, TandemError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler for wrong paths and methods, and for bodies refused unparsed."""
    assert isinstance(error, HTTPException)
    content = http_error_body(error.status_code, error.detail)
    headers = dict(error.headers or {})
    return Response(content, error.status_code, headers=headers, media_type="application/json")


def http_error_body(status: int, message: str) -> bytes:
    """JSON of an error that is HTTP's own and not the model's."""
    body = ErrorBody(message=message, type="invalid_request_error", param=None, code=status)
    return msgspec.json.encode(ErrorReply(body))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Starlette handler for a client that left while it sent its body; nobody reads this answer."""
    return Response(status_code=499)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Starlette handler for bugs: the client learns nothing, the server logs the traceback."""
    body = ErrorBody(message="internal error", type="server_error", param=None, code=500)
    return _json(ErrorReply(body), 500, {})


def _classify(error: TandemError) -> tuple[int, str]:
    return next((status, kind) for cls, status, kind in _STATUSES if isinstance(error, cls))


def _json(reply: ErrorReply, status: int, headers: dict[str, str]) -> Response:
    return Response(
        msgspec.json.encode(reply), status, headers=headers, media_type="application/json"
    )
