"""What all channels to peers share: bounds, keepalive, quick reconnects, the cluster token."""

from typing import Final

from engine.rpc.cluster_token import bearer
from engine.rpc.server import MAX_REPLY_BYTES, MAX_REQUEST_BYTES

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in fact the time that a connection may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata that goes with every call; empty where the cluster has no token."""
    return () if token is None else (("authorization", bearer(token)),)
