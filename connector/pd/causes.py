"""Why a hand-over failed, in one word: for metrics, logs and errors. All the words are here."""

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
"""Nobody answers there in time, or somebody who is no node."""
PEER_DOES_NOT_FIT: Final = "peer_does_not_fit"
"""Two nodes that differ in model, layout or transport: until one of them is started anew."""
UNAUTHENTICATED: Final = "unauthenticated"
"""One of the two does not know the other's token."""
TOO_MANY_PULLS: Final = "too_many_pulls"
"""Too many wait already, here."""
LEASE_LOST: Final = "lease_lost"
"""The peer said so before anything was read."""
LATE_READ: Final = "late_read"
"""The lease had ended before the read did."""
OTHER_PROMPT: Final = "other_prompt"
"""The lease is for another prompt, or for other blocks."""
VERIFICATION_FAILED: Final = "verification_failed"
"""What arrived differs from what the peer holds, twice."""
TRANSFER_FAILED: Final = "transfer_failed"
"""The bytes could not be moved."""
REQUEST_ENDED: Final = "request_ended"
"""Nobody waits for it any more."""
OF_ONE_OBJECT: Final = frozenset(
    {TOO_MANY_PULLS, LATE_READ, OTHER_PROMPT, REQUEST_ENDED, "foreign", "expired", "mismatched"}
)
"""They say nothing of what else the peer holds; an object may be old, or made up."""

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
    """Why a pull failed."""
    return next((word for kind, word in _OF_READS if isinstance(error, kind)), TRANSFER_FAILED)


def of_question(error: BaseException) -> str:
    """Why a peer could not be asked, or what it refused: `foreign`, `expired`, `mismatched`."""
    if isinstance(error, KVTransferParamsError):
        return (error.code or "refused").removesuffix("_kv_transfer_params")
    return next((word for kind, word in _OF_QUESTIONS if isinstance(error, kind)), PEER_UNREACHABLE)
