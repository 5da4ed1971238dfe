"""Whose fault an error is, and what the client gets to see of it. Pure functions."""

from engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineGenerateError,
    InvalidRequestError,
    KVLoadError,
    KVTransferParamsError,
    OverloadedError,
    TandemError,
    TransportError,
    UnavailableError,
)
from proxy.cluster.node_pool import NoDecodeNodeError


def is_client_fault(error: TandemError) -> bool:
    """True where no other node would answer differently.

    `kv_transfer_params` come from P, never from the client, so a refusal of them is the cluster's
    fault.
    """
    return isinstance(error, InvalidRequestError) and not isinstance(error, KVTransferParamsError)


def is_engine_failure(error: TandemError) -> bool:
    """True where an engine broke at the request, so that it could break others."""
    return isinstance(error, EngineDeadError | EngineGenerateError)


def outcome_of(error: TandemError) -> str:
    """Label for the metric of requests by node."""
    if is_client_fault(error):
        return "invalid_request"
    if isinstance(error, OverloadedError):
        return "overloaded"
    if isinstance(error, DeadlineExceededError):
        return "deadline_exceeded"
    return "failed"


def as_client_sees_it(error: TandemError, num_tokens: int) -> TandemError:
    """The error to end the answer with, after `num_tokens` of it were sent.

    What nodes say names addresses and causes: those are for the proxy's log. What nodes hold
    against the proxy (its token, its hand-over, its protocol) must not look like the client's
    mistake, and an answer that broke off must say so.
    """
    after = f" after {num_tokens} tokens" if num_tokens else ""
    match error:
        case InvalidRequestError() if is_client_fault(error):
            return error
        case EngineDeadError() | EngineGenerateError():
            return EngineGenerateError(f"the engine failed at this request{after}")
        case _ if after:
            return UnavailableError(f"the answer broke off{after}")
        case NoDecodeNodeError():
            return error
        case OverloadedError(retry_after_s=seconds):
            return OverloadedError("the cluster is full: try again", retry_after_s=seconds)
        case DeadlineExceededError():
            return DeadlineExceededError("the request was not served in time")
        case KVLoadError() | TransportError():
            return KVLoadError("the computed prompt was lost on its way")
    return UnavailableError("no node could serve the request: try again")
