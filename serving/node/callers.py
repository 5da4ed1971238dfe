"""Access to a node's gRPC port: for this machine, for the members of a cluster, or for nobody."""

import secrets

import structlog

from engine.errors import ConfigError
from serving.config import NodeConfig
from serving.rpc.address import is_loopback
from serving.rpc.proof import SAME_TOKEN
from serving.tls import ClientTls, client_tls

log = structlog.get_logger()


def token_for_calls(config: NodeConfig) -> str | None:
    """The token that callers must know; None: every process of this machine may call.

    Without a cluster token, gRPC is open on a loopback address only, and not where HTTP clients
    need a key, since gRPC would let them pass without it. Any other node gets a token of its own,
    which nobody knows.
    """
    if config.cluster_token is not None:
        return config.cluster_token
    if is_loopback(config.host) and config.api_key is None:
        return None
    why = "it has an API key" if is_loopback(config.host) else f"it listens on {config.host}"
    log.warning(
        f"no cluster token, and {why}: this node answers its own HTTP clients, but no proxy and no "
        f"other node can use it; {SAME_TOKEN}"
    )
    return secrets.token_urlsafe(32)


def tls_to_peers(config: NodeConfig) -> ClientTls | None:
    """TLS for calls to peers: they speak it if this node does. Raises ConfigError."""
    if config.ssl_certfile is not None:
        return client_tls(config.ssl_ca_certs)
    if config.ssl_ca_certs is not None:
        raise ConfigError("--ssl-ca-certs is for nodes with TLS: give --ssl-certfile too")
    return None
