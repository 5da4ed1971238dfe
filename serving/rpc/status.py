"""Errors <-> gRPC status codes, only here: the peer raises the same leaf with the same fields.

The leaf's name and fields travel as an `ErrorDetail` in the trailing metadata. If a failed call has
none, no service of ours answered it: the link or the other process failed.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from google.protobuf.message import DecodeError
from grpc import StatusCode

from engine import errors
from engine.errors import TandemError
from serving.rpc.pb import node_pb2 as pb

DETAIL_KEY: Final = "tandem-error-bin"
_MAX_MESSAGE_CHARS: Final = 2000
_FIELDS: Final = ("param", "code", "retry_after_s")
"""Attributes of errors, and fields of `ErrorDetail`."""

# A leaf that is not listed has the status of its base. RequestAbortedError is ABORTED, not
# CANCELLED: gRPC reports its own cancellations with that code.
_STATUS: Final[Mapping[type[TandemError], StatusCode]] = {
    TandemError: StatusCode.INTERNAL,
    errors.InvalidRequestError: StatusCode.INVALID_ARGUMENT,
    errors.UnknownModelError: StatusCode.NOT_FOUND,
    errors.AuthenticationError: StatusCode.UNAUTHENTICATED,
    errors.OverloadedError: StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError: StatusCode.DEADLINE_EXCEEDED,
    errors.KVLoadError: StatusCode.DATA_LOSS,
    errors.RequestAbortedError: StatusCode.ABORTED,
    errors.ConfigError: StatusCode.FAILED_PRECONDITION,
    errors.CheckpointError: StatusCode.FAILED_PRECONDITION,
    errors.KVEventError: StatusCode.INVALID_ARGUMENT,
    errors.TransportError: StatusCode.UNAVAILABLE,
    errors.TransferTimeoutError: StatusCode.DEADLINE_EXCEEDED,
    errors.LateReadError: StatusCode.DATA_LOSS,
    errors.OtherPromptError: StatusCode.DATA_LOSS,
    errors.VerificationError: StatusCode.DATA_LOSS,
}

_BY_NAME: Final[Mapping[str, type[TandemError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type)
}

_WITHOUT_DETAIL: Final[Mapping[StatusCode, type[TandemError]]] = {
    StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    StatusCode.UNIMPLEMENTED: errors.ConfigError,
}


def status_code(error: TandemError) -> StatusCode:
    """The status of the error's class, or of its nearest listed base."""
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def error_to_detail(error: TandemError) -> pb.ErrorDetail:
    """The part of `error` that a peer is told; long messages are cut, as peers bound metadata."""
    return pb.ErrorDetail(
        error=next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME),
        message=str(error)[:_MAX_MESSAGE_CHARS],
        **{name: value for name, value in vars(error).items() if name in _FIELDS},
    )


def error_from_status(
    code: StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]]
) -> TandemError:
    """The error that the peer raised, or the nearest one where only gRPC itself spoke."""
    for key, value in metadata:
        if key == DETAIL_KEY and isinstance(value, bytes):
            with suppress(DecodeError):
                return error_of(pb.ErrorDetail.FromString(value))
    return _WITHOUT_DETAIL.get(code, errors.UnavailableError)(f"{code.name}: {message}")


def error_of(detail: pb.ErrorDetail) -> TandemError:
    """The error that the peer raised."""
    error = _BY_NAME.get(detail.error, TandemError)(detail.message)
    for name in vars(error).keys() & set(_FIELDS):
        if detail.HasField(name):
            setattr(error, name, getattr(detail, name))
    return error
