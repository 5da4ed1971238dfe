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

PEER_UNREACHABLE: Final = "peer_unreachable"  # no node answers there in time
PEER_DOES_NOT_FIT: Final = "peer_does_not_fit"  # another model, layout or transport
UNAUTHENTICATED: Final = "unauthenticated"  # one of the two does not know the other's token
TOO_MANY_PULLS: Final = "too_many_pulls"  # too many wait on this node
LEASE_LOST: Final = "lease_lost"  # the peer said so before anything was read
LATE_READ: Final = "late_read"  # the lease had ended before the read did
OTHER_PROMPT: Final = "other_prompt"  # the lease is for another prompt, or for other blocks
VERIFICATION_FAILED: Final = "verification_failed"  # the bytes differ from the peer's, twice
TRANSFER_FAILED: Final = "transfer_failed"  # the bytes could not be moved
REQUEST_ENDED: Final = "request_ended"  # no request waits for it now
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
