"""Digests of token prefixes: what blocks and checkpoints are found by, on every node and machine.

The digest of a prefix is SHA-256 over the cluster's seed, the request's salt and its tokens, so
equal text under different salts never meets. One running hash gives the digests of all prefixes
that end at hash boundaries (every `hash_block_size` tokens) in one pass. Torch-free.
"""

from array import array
from hashlib import sha256

from engine.types import TokenId

DIGEST_BYTES = 32
TOKEN_BYTES = 4


class PrefixHasher:
    """The hash function of one cluster: equal seeds give equal digests in every process."""

    def __init__(self, hash_block_size: int, seed: str = "") -> None:
        self.hash_block_size = hash_block_size
        self._seed = seed

    def root(self, cache_salt: str | None) -> bytes:
        """What stands before the tokens of every prefix under `cache_salt`; 64 bytes."""
        salt = b"" if cache_salt is None else b"=" + cache_salt.encode()
        return b"".join(sha256(part).digest() for part in (self._seed.encode(), salt))


class PrefixDigests:
    """Digests of the prefixes of one request's tokens, computed once, when they are asked for.

    Holds the request's own token list: prefixes grow as it generates.
    """

    def __init__(
        self, hasher: PrefixHasher, token_ids: list[TokenId], cache_salt: str | None
    ) -> None:
        self.hash_block_size = hasher.hash_block_size
        self._token_ids = token_ids
        self._hash = sha256(hasher.root(cache_salt))
        self._boundaries = [self._hash.digest()]
        self._num_hashed = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self._token_ids)

    def boundaries(self) -> list[bytes]:
        """Digests of the known prefixes of 0, 1, 2, ... whole hash blocks; read it, keep it not."""
        size, digests = self.hash_block_size, self._boundaries
        if len(self._token_ids) - self._num_hashed < size:
            return digests
        start = self._num_hashed
        self._num_hashed = end = len(self._token_ids) // size * size
        block_bytes, running = size * TOKEN_BYTES, self._hash
        tokens = array("I", self._token_ids[start:end]).tobytes()
        for offset in range(0, len(tokens), block_bytes):
            running.update(tokens[offset : offset + block_bytes])
            digests.append(running.digest())
        return digests

    def tail(self, boundary: int, num_tokens: int) -> tuple[TokenId, ...]:
        """The tokens of the first `num_tokens` that lie behind the first `boundary`."""
        return tuple(self._token_ids[boundary:num_tokens])
