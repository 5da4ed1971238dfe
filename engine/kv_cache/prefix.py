"""Digests of token prefixes: the names of blocks and checkpoints, on every node and machine.

The digest of a prefix that ends at a hash boundary (every `hash_block_size` tokens) is SHA-256 over
the cluster's seed, the request's salt and its tokens, so equal text under different salts never
meets; one running hash gives all of them in one pass. A prefix that ends between two boundaries has
the SHA-256 over the boundary's digest and the tokens after it. Torch-free.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from engine.types import TokenId

DIGEST_BYTES = 32
TOKEN_BYTES = 4


class PrefixKey(NamedTuple):
    """A prefix of any length: its last hash boundary, and the tokens after that."""

    num_tokens: int
    boundary: bytes
    tail: tuple[TokenId, ...]

    @property
    def digest(self) -> bytes:
        """The digest of the whole prefix, `DIGEST_BYTES` long."""
        return sha256(self.boundary + _bytes(self.tail)).digest() if self.tail else self.boundary


class PrefixHasher:
    """The hash function of one cluster: equal seeds give equal digests in every process."""

    def __init__(self, hash_block_size: int, seed: str = "") -> None:
        self.hash_block_size = hash_block_size
        self._seed = seed

    def root(self, cache_salt: str | None) -> bytes:
        """64 bytes that precede the tokens of every prefix under `cache_salt`."""
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
        self.cache_salt = cache_salt
        self._token_ids = token_ids
        self._hash = sha256(hasher.root(cache_salt))
        self._boundaries = [self._hash.digest()]
        self._num_hashed = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self._token_ids)

    def boundaries(self) -> list[bytes]:
        """Digests of the known prefixes of 0, 1, 2, ... whole hash blocks; read-only, and grows."""
        size, digests = self.hash_block_size, self._boundaries
        if len(self._token_ids) - self._num_hashed < size:
            return digests
        start = self._num_hashed
        self._num_hashed = end = len(self._token_ids) // size * size
        # One running hash: its digest after each hash block is that of the whole prefix.
        block_bytes, running = size * TOKEN_BYTES, self._hash
        tokens = _bytes(self._token_ids[start:end])
        for offset in range(0, len(tokens), block_bytes):
            running.update(tokens[offset : offset + block_bytes])
            digests.append(running.digest())
        return digests

    def digest_at(self, num_tokens: int) -> bytes:
        """The digest of the first `num_tokens` tokens, which end at a hash boundary."""
        return self.boundaries()[num_tokens // self.hash_block_size]

    def tokens(self, start: int, end: int) -> tuple[TokenId, ...]:
        """The tokens at positions `start` to `end` - 1."""
        return tuple(self._token_ids[start:end])

    def key(self, num_tokens: int) -> PrefixKey:
        """The key of the first `num_tokens` tokens."""
        num_whole = num_tokens // self.hash_block_size
        tail = self.tokens(num_whole * self.hash_block_size, num_tokens)
        return PrefixKey(num_tokens, self.boundaries()[num_whole], tail)


def _bytes(token_ids: Sequence[TokenId]) -> bytes:
    return array("I", token_ids).tobytes()
