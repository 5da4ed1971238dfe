"""Errors <-> gRPC status codes, only here: the peer raises the same leaf with the same fields.

The leaf's name and fields travel as an `ErrorDetail` in the trailing metadata. A failed call
without one was not answered by a service of ours, so the link or the process behind it is to
blame.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError
from grpc import StatusCode

from engine import errors
from engine.errors import TandemError
from engine.rpc.pb import node_pb2 as pb

DETAIL_KEY: Final = "tandem-error-bin"
_MAX_MESSAGE_CHARS: Final = 2000

# RequestAbortedError is ABORTED, not CANCELLED: gRPC reports its own cancellations with that code.
_STATUS: Final[Mapping[type[TandemError], StatusCode]] = {
    TandemError: StatusCode.INTERNAL,
    errors.InvalidRequestError: StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLongError: StatusCode.INVALID_ARGUMENT,
    errors.KVTransferParamsError: StatusCode.INVALID_ARGUMENT,
    errors.UnknownModelError: StatusCode.NOT_FOUND,
    errors.AuthenticationError: StatusCode.UNAUTHENTICATED,
    errors.OverloadedError: StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: StatusCode.UNAVAILABLE,
    errors.UnprovenPeerError: StatusCode.UNAVAILABLE,
    errors.NodeLostError: StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError: StatusCode.DEADLINE_EXCEEDED,
    errors.KVLoadError: StatusCode.DATA_LOSS,
    errors.RequestAbortedError: StatusCode.ABORTED,
    errors.EngineGenerateError: StatusCode.INTERNAL,
    errors.EngineDeadError: StatusCode.INTERNAL,
    errors.ConfigError: StatusCode.FAILED_PRECONDITION,
    errors.CheckpointError: StatusCode.FAILED_PRECONDITION,
    errors.TransportError: StatusCode.UNAVAILABLE,
    errors.TransferTimeoutError: StatusCode.DEADLINE_EXCEEDED,
    errors.LateReadError: StatusCode.DATA_LOSS,
    errors.OtherPromptError: StatusCode.DATA_LOSS,
    errors.VerificationError: StatusCode.DATA_LOSS,
}
_BY_NAME: Final[Mapping[str, type[TandemError]]] = {cls.__name__: cls for cls in _STATUS}

_WITHOUT_DETAIL: Final[Mapping[StatusCode, type[TandemError]]] = {
    StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    StatusCode.UNIMPLEMENTED: errors.ConfigError,
}


def status_code(error: TandemError) -> StatusCode:
    """The status of the error's class, or of its nearest listed base."""
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def error_to_detail(error: TandemError) -> bytes:
    """Serialized `ErrorDetail`; long messages are cut, since metadata is bounded by the peer."""
    detail = pb.ErrorDetail(
        error=next(cls.__name__ for cls in type(error).__mro__ if cls in _STATUS),
        message=str(error)[:_MAX_MESSAGE_CHARS],
    )
    match error:
        case errors.InvalidRequestError(param=param, code=code):
            detail.MergeFrom(pb.ErrorDetail(param=param, code=code))
        case errors.OverloadedError(retry_after_s=seconds):
            detail.retry_after_s = seconds
        case errors.UnavailableError(retry_after_s=seconds):
            detail.retry_after_s = seconds
    return detail.SerializeToString()


def error_from_status(
    code: StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]]
) -> TandemError:
    """The error that the peer raised, or the nearest one where only gRPC itself spoke."""
    detail = _find_detail(metadata)
    if detail is not None:
        return _rebuild(detail)
    return _WITHOUT_DETAIL.get(code, errors.UnavailableError)(f"{code.name}: {message}")


def _find_detail(metadata: Iterable[tuple[str, str | bytes]]) -> pb.ErrorDetail | None:
    for key, value in metadata:
        if key == DETAIL_KEY and isinstance(value, bytes):
            return _parse_detail(value)
    return None


def _parse_detail(data: bytes) -> pb.ErrorDetail | None:
    try:
        return pb.ErrorDetail.FromString(data)
    except DecodeError:
        return None


def _rebuild(detail: pb.ErrorDetail) -> TandemError:
    cls = _BY_NAME.get(detail.error, TandemError)
    if issubclass(cls, errors.InvalidRequestError):
        return _rebuild_invalid(cls, detail)
    if issubclass(cls, errors.OverloadedError | errors.UnavailableError):
        return cls(detail.message, retry_after_s=detail.retry_after_s)
    return cls(detail.message)


def _rebuild_invalid(
    cls: type[errors.InvalidRequestError], detail: pb.ErrorDetail
) -> errors.InvalidRequestError:
    code = detail.code if detail.HasField("code") else None
    if issubclass(cls, errors.KVTransferParamsError):
        return cls(detail.message) if code is None else cls(detail.message, code=code)
    return cls(detail.message, param=detail.param if detail.HasField("param") else None, code=code)
