"""Errors of a request in a cluster: who caused one, and what the client is told."""

from engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineGenerateError,
    GrammarBusyError,
    GrammarError,
    InvalidRequestError,
    KVLoadError,
    KVTransferParamsError,
    OverloadedError,
    TandemError,
    TransportError,
    UnavailableError,
    is_client_fault,
)
from proxy.backends.worker import PrefillFailedError


class NoDecodeNodeError(UnavailableError):
    """For clients and probes, who may be anybody; the log names the node and the cause."""

    def __init__(self) -> None:
        super().__init__("no decode node is available: try again; the proxy's log says why")


class NoPrefillNodeError(UnavailableError):
    """As `NoDecodeNodeError`: some engines' decode workers compute no prompts."""

    def __init__(self) -> None:
        super().__init__("no prefill node is available: try again; the proxy's log says why")


def is_engine_failure(error: TandemError) -> bool:
    """True where the request broke an engine, so that it could break others."""
    return isinstance(error, EngineDeadError | EngineGenerateError)


def is_final(error: TandemError) -> bool:
    """True where another node would say the same, or fall as this one did."""
    return is_engine_failure(error) or isinstance(error, GrammarError)


def is_node_failure(error: TandemError) -> bool:
    """True where the node is the likely cause: not the request, nor its queue, nor another node."""
    others = OverloadedError | KVLoadError | KVTransferParamsError | PrefillFailedError
    return not (is_client_fault(error) or is_engine_failure(error) or isinstance(error, others))


def outcome_of(error: TandemError) -> str:
    """The `outcome` label of `tandem_proxy_node_requests`."""
    if is_client_fault(error):
        return "invalid_request"
    if isinstance(error, PrefillFailedError):
        # D did nothing but wait.
        return "cancelled"
    if isinstance(error, OverloadedError):
        return "overloaded"
    return "deadline_exceeded" if isinstance(error, DeadlineExceededError) else "failed"


def as_client_sees_it(error: TandemError, num_tokens: int) -> TandemError:
    """The error that ends the answer after the client got `num_tokens` of it.

    Nodes name addresses and causes in their errors: the log gets those. A node's complaint about
    the proxy (its token, its hand-over, its protocol) must not look like the client's mistake, and
    a broken answer must say that it is incomplete.
    """
    after = f" after {num_tokens} tokens" if num_tokens else ""
    match error:
        case InvalidRequestError() if is_client_fault(error):
            return error
        case EngineDeadError() | EngineGenerateError():
            return EngineGenerateError(f"the engine failed at this request{after}")
        case _ if after:
            return UnavailableError(f"the answer broke off{after}")
        case NoDecodeNodeError() | NoPrefillNodeError() | GrammarBusyError():
            return error
        case OverloadedError(retry_after_s=seconds):
            return OverloadedError("the cluster is full: try again", retry_after_s=seconds)
        case DeadlineExceededError():
            return DeadlineExceededError("the request was not served in time")
        case KVLoadError() | TransportError():
            return KVLoadError("the computed prompt was lost on its way")
    return UnavailableError("no node could serve the request: try again")
