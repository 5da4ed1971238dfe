"""Bounds of messages, and the options of all channels to peers: keepalive, quick reconnects."""

from typing import Final

import grpc

from engine.errors import TandemError
from serving.rpc.proof import unproven
from serving.rpc.status import error_from_status

MAX_REQUEST_BYTES: Final = 32 * 2**20
MAX_REPLY_BYTES: Final = 64 * 2**20

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what grpc.keepalive_timeout_ms no longer sets
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in fact the time that a connection may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Else channels of this process with equal options would share one connection.
    ("grpc.use_local_subchannel_pool", 1),
    # `http_proxy` of the environment is for the internet, not for the nodes of a cluster.
    ("grpc.enable_http_proxy", 0),
)
PROVE_TIMEOUT_S: Final = 5.0
"""At most; a call that may take less gives its proof less."""

_OF_THE_LINK: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)


def no_proof(code: grpc.StatusCode, details: str | None, address: str) -> TandemError:
    """The error where a server's proof was asked for and did not come."""
    if code in _OF_THE_LINK:
        return error_from_status(code, f"{details} (node {address})", ())
    return unproven(address, f"{code.name}: {details}")
