"""Names of prefixes in caches of other projects' engines, made from the names of shorter ones.

The digest of a hash block is SHA-256 over that of the prefix before it and the block's tokens: one
digest is all that must be kept of a block to name the next one, where a running hash
(`engine/kv_cache/prefix.py`) would need its whole state.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from engine.kv_cache.prefix import TOKEN_BYTES
from engine.types import TokenId
from serving.kv_events.wire import salt_key

ROOT: Final = sha256().digest()
"""The prefix without tokens."""
_KEYS = b"keys"


def chained(before: bytes, tokens: bytes, keys: bytes = b"") -> bytes:
    """The digest of the prefix `before` with more tokens, 4 bytes each, and opaque keys if any."""
    if keys:
        before = sha256(_KEYS + before + keys).digest()
    return sha256(before + tokens).digest()


def token_bytes(token_ids: Sequence[TokenId]) -> bytes:
    """As they are hashed. Raises OverflowError for what is no token of 32 bits."""
    return array("I", token_ids).tobytes()


class ChainedDigests:
    """Digests of the prefixes of one prompt, computed when they are first asked for."""

    def __init__(
        self, hash_block_size: int, token_ids: Sequence[TokenId], cache_salt: str | None
    ) -> None:
        self._block_bytes = hash_block_size * TOKEN_BYTES
        self._tokens = token_bytes(token_ids)
        self._keys = salt_key(cache_salt) if cache_salt else b""
        self._boundaries = [ROOT]

    def boundaries(self) -> list[bytes]:
        """Digests of the prefixes of 0, 1, 2, ... whole hash blocks; read-only."""
        size, digests = self._block_bytes, self._boundaries
        if len(digests) > 1:
            return digests
        for end in range(size, len(self._tokens) + 1, size):
            # The salt is a key of the first block, and of those after it by their parents.
            keys = self._keys if end == size else b""
            digests.append(chained(digests[-1], self._tokens[end - size : end], keys))
        return digests

    def digest_at(self, num_tokens: int) -> bytes:
        """The digest of the first `num_tokens` tokens."""
        end = num_tokens * TOKEN_BYTES
        whole, rest = divmod(end, self._block_bytes)
        if not rest:
            return self.boundaries()[whole]
        keys = b"" if whole else self._keys
        return chained(self.boundaries()[whole], self._tokens[end - rest : end], keys)
