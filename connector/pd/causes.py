"""The causes of failed hand-overs, one word each, for metrics, logs and errors."""

from typing import Final

from engine.errors import (
    AuthenticationError,
    KVTransferParamsError,
    LateReadError,
    OtherPromptError,
    OverloadedError,
    TransportError,
    UnprovenPeerError,
    VerificationError,
)

PEER_UNREACHABLE: Final = "peer_unreachable"
"""The peer did not answer in time, or is not a node."""
PEER_DOES_NOT_FIT: Final = "peer_does_not_fit"
"""The nodes differ in model, geometry or transport: only a restart can help."""
UNAUTHENTICATED: Final = "unauthenticated"
"""The cluster tokens of the two nodes differ."""
TOO_MANY_PULLS: Final = "too_many_pulls"
"""This node has too many waiting pulls."""
LEASE_LOST: Final = "lease_lost"
"""The peer reported, before the read, that the lease had ended."""
LATE_READ: Final = "late_read"
"""The lease had ended before the read did."""
OTHER_PROMPT: Final = "other_prompt"
"""The lease is for another prompt or for other blocks."""
VERIFICATION_FAILED: Final = "verification_failed"
"""The bytes that arrived differ from the peer's, also when read again."""
TRANSFER_FAILED: Final = "transfer_failed"
"""The bytes could not be moved."""
REQUEST_ENDED: Final = "request_ended"
"""The request ended before the pull did."""
OF_ONE_OBJECT: Final = frozenset(
    {TOO_MANY_PULLS, LATE_READ, OTHER_PROMPT, REQUEST_ENDED, "foreign", "expired", "mismatched"}
)
"""Causes that concern one request's object, which may be old or forged, not the peer itself."""

_OF_READS: Final = (
    (LateReadError, LATE_READ),
    (OtherPromptError, OTHER_PROMPT),
    (VerificationError, VERIFICATION_FAILED),
)
_OF_QUESTIONS: Final = (
    (TransportError, PEER_DOES_NOT_FIT),
    (AuthenticationError | UnprovenPeerError, UNAUTHENTICATED),
    (OverloadedError, TOO_MANY_PULLS),
)


def of_read(error: BaseException) -> str:
    """The cause of a failed pull."""
    return next((word for kind, word in _OF_READS if isinstance(error, kind)), TRANSFER_FAILED)


def of_question(error: BaseException) -> str:
    """The cause of a failed or refused control call: `foreign`, `expired`, `mismatched`, ..."""
    if isinstance(error, KVTransferParamsError):
        return (error.code or "refused").removesuffix("_kv_transfer_params")
    return next((word for kind, word in _OF_QUESTIONS if isinstance(error, kind)), PEER_UNREACHABLE)
