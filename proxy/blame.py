"""Whose fault an error is, and what the client gets to see of it. Pure functions."""

from engine.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    KVTransferParamsError,
    OverloadedError,
    TandemError,
    UnavailableError,
)


def is_client_fault(error: TandemError) -> bool:
    """True where no other node would answer differently.

    `kv_transfer_params` come from P, never from the client, so a refusal of them is the cluster's
    fault.
    """
    return isinstance(error, InvalidRequestError) and not isinstance(error, KVTransferParamsError)


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

    What nodes hold against the proxy (its token, its hand-over, its protocol) must not look like
    the client's mistake, and an answer that broke off must say so.
    """
    if is_client_fault(error):
        return error
    if num_tokens:
        return UnavailableError(f"the answer broke off after {num_tokens} tokens: {error}")
    if isinstance(error, AuthenticationError | ConfigError | KVTransferParamsError):
        return UnavailableError(f"the cluster could not serve the request: {error}")
    return error
