"""Both ends of a connection prove that they know the cluster token, without sending it.

    caller -> node    nonce c                            Prove
    node -> caller    nonce n, MAC(node, c, n, port)     the caller checks it before any call
    caller -> node    c, MAC(caller, c, n, port)         with every call; the node keeps no state
    node -> caller    MAC(reply, c, n, port)             with every reply

The node's nonce is new at every start of the process. The last MAC is for callers that cannot see
whether their connection is still the same. No message is of use to another process, and nobody
learns the token or passes for a node without it.

The MACs include the port on which the node listens, so a process that took over the port of a dead
node cannot forward the question to a living one.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from engine.errors import InvalidRequestError, UnprovenPeerError
from serving.rpc.pb import node_pb2 as pb

SAME_TOKEN: Final = (
    "give all nodes and the proxy the same --cluster-token (or TANDEM_CLUSTER_TOKEN)"
)
PROVE_METHOD: Final = "/tandem.v1.Identity/Prove"
NONCE_KEY: Final = "tandem-nonce-bin"
PROOF_KEY: Final = "tandem-proof-bin"
NONCE_BYTES: Final = 32
OF_NODE: Final = b"tandem node"
OF_CALLER: Final = b"tandem caller"
OF_REPLY: Final = b"tandem reply"

Metadata: TypeAlias = tuple[tuple[str, bytes], ...]
Received: TypeAlias = Iterable[tuple[str, str | bytes]]


@dataclass(slots=True, frozen=True)
class Proven:
    """Metadata of every call to a node that has proven itself, and the proof in its replies."""

    metadata: Metadata = ()
    reply: bytes = b""

    def is_reply(self, metadata: Received) -> bool:
        """True if `metadata` ends a reply of that node."""
        return hmac.compare_digest(_only(metadata, PROOF_KEY), self.reply)


NOT_NEEDED: Final = Proven()
"""The proof in a cluster without a token."""


class NodeProof:
    """A node's side. `port`: where it listens, known once it does."""

    def __init__(self, token: str) -> None:
        self.port = 0
        self._key = _call_key(token)
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def answer(self, metadata: Received) -> pb.ProveReply:
        """The node's proof. Raises `InvalidRequestError` for a call without a nonce."""
        nonce = _only(metadata, NONCE_KEY)
        if len(nonce) != NONCE_BYTES:
            raise InvalidRequestError(f"{NONCE_KEY} must be {NONCE_BYTES} bytes, once")
        proof = _mac(self._key, OF_NODE, nonce + self._nonce, port=self.port)
        return pb.ProveReply(server_nonce=self._nonce, proof=proof)

    def is_known(self, metadata: Received) -> bool:
        """True if the caller has proven, to this process, that it knows the token."""
        entries = tuple(metadata)
        # Computed anew for every call: the node keeps no list of callers that could be filled.
        nonce = _only(entries, NONCE_KEY)
        expected = _mac(self._key, OF_CALLER, nonce + self._nonce, port=self.port)
        return hmac.compare_digest(_only(entries, PROOF_KEY), expected)

    def of_reply(self, metadata: Received) -> Metadata:
        """Trailing metadata of a reply to the caller that sent `metadata`."""
        nonces = _only(metadata, NONCE_KEY) + self._nonce
        return ((PROOF_KEY, _mac(self._key, OF_REPLY, nonces, port=self.port)),)


class CallerProof:
    """A caller's side of one connection to `address`."""

    def __init__(self, token: str, address: str) -> None:
        self._address = address
        port = address.rpartition(":")[2]
        self._port = int(port) if port.isdecimal() and int(port) < 2**16 else 0
        self._key = _call_key(token)
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def question(self) -> Metadata:
        """Metadata of the call that asks for the node's proof."""
        return ((NONCE_KEY, self._nonce),)

    def check(self, reply: pb.ProveReply) -> Proven:
        """Raises `UnprovenPeerError` unless the node's proof is right."""
        nonces = self._nonce + reply.server_nonce
        expected = _mac(self._key, OF_NODE, nonces, port=self._port)
        if len(reply.server_nonce) != NONCE_BYTES or not hmac.compare_digest(reply.proof, expected):
            raise unproven(self._address, "it has another token, or another process has its port")
        mine = _mac(self._key, OF_CALLER, nonces, port=self._port)
        its = _mac(self._key, OF_REPLY, nonces, port=self._port)
        return Proven((*self.question, (PROOF_KEY, mine)), its)


def signing_key(token: str) -> bytes:
    """The key derived from the cluster token with which nodes sign `kv_transfer_params`."""
    return hmac.digest(_stretched(token), b"tandem signing key v1", hashlib.sha256)


def unproven(address: str, cause: str) -> UnprovenPeerError:
    """The error for a server that did not prove that it knows the token."""
    return UnprovenPeerError(
        f"{address} did not prove that it knows the cluster token ({cause}); {SAME_TOKEN}, and "
        "reach each node by the very port on which it listens"
    )


def _call_key(token: str) -> bytes:
    return hmac.digest(_stretched(token), b"tandem call key v1", hashlib.sha256)


# Cached: every connection of a process asks for the same token.
@lru_cache(maxsize=64)
def _stretched(token: str) -> bytes:
    """Slow on purpose: who has a proof can try tokens against it for as long as they like."""
    return hashlib.scrypt(token.encode(), salt=b"tandem cluster token v1", n=2**14, r=8, p=1)


def _mac(key: bytes, label: bytes, nonces: bytes, *, port: int) -> bytes:
    # Nonces and ports have fixed lengths, so no two different messages are the same bytes.
    return hmac.digest(key, label + port.to_bytes(2) + nonces, hashlib.sha256)


def _only(metadata: Received, key: str) -> bytes:
    """The value of an entry that is there once; empty for none, several or text."""
    found = [value for name, value in metadata if name == key]
    return found[0] if len(found) == 1 and isinstance(found[0], bytes) else b""
