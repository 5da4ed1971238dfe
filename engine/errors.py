"""The exception tree: each leaf means one thing, is raised at its cause and caught at a border.

TandemError
├── InvalidRequestError          the caller's request is wrong; HTTP 400
│   ├── PromptTooLongError       more tokens than the context holds
│   ├── KVTransferParamsError    kv_transfer_params that are partial, foreign, expired or mistyped
│   ├── GrammarError             a grammar that cannot be compiled or followed, on any node
│   └── UnknownModelError        HTTP 404
├── AuthenticationError          missing or wrong key; HTTP 401
├── ForbiddenError               the key is known and may not do this; HTTP 403
├── OverloadedError              a bounded queue is full; HTTP 429 with Retry-After
│   └── GrammarBusyError         no turn to compile a grammar came in time
├── UnavailableError             no node can serve this now; HTTP 503 with Retry-After
│   ├── UnprovenPeerError        a peer did not prove that it knows the cluster token
│   └── NodeLostError            a node went away while it had the request
├── DeadlineExceededError        an await ran past its deadline; HTTP 504
├── KVLoadError                  a remote prefill is lost and the policy is `fail`; HTTP 502
├── RequestAbortedError          the request was cancelled while its caller still waited
├── EngineGenerateError          computing this request failed, the engine goes on; HTTP 500
├── EngineDeadError              the engine thread stopped; HTTP 500, the node is not live
├── ConfigError                  a flag or file asks for something impossible
├── CheckpointError              a model folder does not match its config
├── KVEventError                 a payload is no batch of KV events
└── TransportError               bytes could not be moved
    ├── OutOfReachError          no transport leads to a peer's memory
    ├── TransferTimeoutError     they did not move in time
    ├── LateReadError            P's lease had ended before the read did
    ├── OtherPromptError         P's lease is for another prompt, or for other blocks
    └── VerificationError        the bytes differ from P's, also when read again
"""

from collections.abc import Sequence


class TandemError(Exception):
    """Base of every error that this project raises on purpose."""


class InvalidRequestError(TandemError):
    """The request itself is wrong: `param` names the field, `code` the machine-readable cause."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit the context."""


class KVTransferParamsError(InvalidRequestError):
    """`kv_transfer_params` cannot be honoured: partial, mistyped, foreign or expired."""

    def __init__(self, message: str, *, code: str = "invalid_kv_transfer_params") -> None:
        super().__init__(message, param="kv_transfer_params", code=code)


class GrammarError(InvalidRequestError):
    """The request's grammar cannot be compiled or followed.

    Every node says the same, so that none need be asked a second time.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, param="grammar")


class UnknownModelError(InvalidRequestError):
    """The request names a model that this server does not serve."""


class AuthenticationError(TandemError):
    """The key is missing or wrong."""


class ForbiddenError(TandemError):
    """The key is known, but what it asks for is not for its holder."""


class OverloadedError(TandemError):
    """A bounded queue is full; the caller may come back after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GrammarBusyError(OverloadedError):
    """Other grammars were compiled until there was no more time to wait for a turn."""


class UnavailableError(TandemError):
    """No node can serve the request now; the caller may come back after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnprovenPeerError(UnavailableError):
    """The peer at a node's address did not prove that it belongs to the cluster."""


class NodeLostError(UnavailableError):
    """A node that had the request went away or stopped answering, without a reason."""


class DeadlineExceededError(TandemError):
    """An answer did not come before its deadline."""


class KVLoadError(TandemError):
    """The remote prefill could not be loaded and `kv_load_failure_policy` is `fail`."""


class RequestAbortedError(TandemError):
    """The request was cancelled."""


class EngineGenerateError(TandemError):
    """Computing one request failed and ended it; the engine goes on, another node would fail too.

    Named as in vLLM.
    """


class EngineDeadError(TandemError):
    """The engine thread has stopped; nothing more will be generated by this process."""


class ConfigError(TandemError):
    """A flag, a file or their combination is wrong."""


class CheckpointError(TandemError):
    """A model folder does not hold what its config promises."""


class KVEventError(TandemError):
    """A payload is no batch of KV events in any form that was ever published."""


class TransportError(TandemError):
    """A transport could not register, connect or move bytes."""


class OutOfReachError(TransportError):
    """No way leads to a peer's memory; `left` names transports that it does not serve by yet."""

    def __init__(self, message: str, left: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.left = tuple(left)


class TransferTimeoutError(TransportError):
    """A transfer was not done before its deadline."""


class LateReadError(TransportError):
    """The lease had ended before the read did: the bytes may be another request's."""


class OtherPromptError(TransportError):
    """P's lease is for another prompt, or holds it in other blocks than those that were read."""


class VerificationError(TransportError):
    """The bytes of a block or state differ from the peer's, also when they were read again."""


def is_client_fault(error: TandemError) -> bool:
    """True where the request is wrong, on whatever node.

    The proxy takes `kv_transfer_params` from P, never from the client, so the cluster caused a
    refusal of them.
    """
    return isinstance(error, InvalidRequestError) and not isinstance(error, KVTransferParamsError)
