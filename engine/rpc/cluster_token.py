"""The keys that are derived from a cluster's one secret, which never leaves the process."""

import hashlib
import hmac
from functools import lru_cache
from typing import Final

SAME_TOKEN: Final = (
    "give all nodes and the proxy the same --cluster-token (or TANDEM_CLUSTER_TOKEN)"
)


def call_key(token: str) -> bytes:
    """With it, callers and nodes prove to each other that they know the token."""
    return hmac.digest(_stretched(token), b"tandem call key v1", hashlib.sha256)


def signing_key(token: str) -> bytes:
    """With it, nodes sign `kv_transfer_params`."""
    return hmac.digest(_stretched(token), b"tandem signing key v1", hashlib.sha256)


# Cached: every connection of a process asks for the same token.
@lru_cache(maxsize=64)
def _stretched(token: str) -> bytes:
    """Slow on purpose: who has a proof can try tokens against it for as long as they like."""
    return hashlib.scrypt(token.encode(), salt=b"tandem cluster token v1", n=2**14, r=8, p=1)
