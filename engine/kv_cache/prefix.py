"""Digests of token prefixes: the names of blocks and checkpoints, on every node and machine.

The digest of a prefix is SHA-256 over the cluster's seed, the request's salt and its tokens: equal
text under different salts never meets, and nodes may cut blocks as they like. One running hash
gives those at all hash boundaries (every `hash_block_size` tokens) in one pass. Torch-free.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from engine.types import TokenId

DIGEST_BYTES = 32
TOKEN_BYTES = 4
HASHES_PER_COPY = 64
"""Hash blocks between two copies of the running hash: a digest between boundaries starts there."""


class PrefixKey(NamedTuple):
    """A prefix of any length: its last hash boundary, the tokens after that, and its own digest."""

    num_tokens: int
    boundary: bytes
    tail: tuple[TokenId, ...]
    digest: bytes


class PrefixHasher:
    """The hash function of one cluster: equal seeds give equal digests in every process."""

    def __init__(self, hash_block_size: int, seed: str = "") -> None:
        self.hash_block_size = hash_block_size
        self._seed = seed

    def root(self, cache_salt: str | None) -> bytes:
        """64 bytes that precede the tokens of every prefix under `cache_salt`."""
        salt = b"" if cache_salt is None else b"=" + cache_salt.encode()
        return b"".join(sha256(part).digest() for part in (self._seed.encode(), salt))

    def digest(self, token_ids: Sequence[TokenId], cache_salt: str | None) -> bytes:
        """The digest of all these tokens, `DIGEST_BYTES` long, whatever the hash block size."""
        return sha256(self.root(cache_salt) + _bytes(token_ids)).digest()


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
        self._copies = [self._hash.copy()]  # after 0, 1, 2, ... times HASHES_PER_COPY hash blocks
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
            if len(digests) % HASHES_PER_COPY == 0:
                self._copies.append(running.copy())
            digests.append(running.digest())
        return digests

    def digest_at(self, num_tokens: int) -> bytes:
        """The digest of the first `num_tokens` tokens."""
        whole, rest = divmod(num_tokens, self.hash_block_size)
        digests = self.boundaries()
        if not rest:
            return digests[whole]
        copy = whole // HASHES_PER_COPY
        running = self._copies[copy].copy()
        start = copy * HASHES_PER_COPY * self.hash_block_size
        running.update(_bytes(self._token_ids[start:num_tokens]))
        return running.digest()

    def tokens(self, start: int, end: int) -> tuple[TokenId, ...]:
        """The tokens at positions `start` to `end` - 1."""
        return tuple(self._token_ids[start:end])

    def key(self, num_tokens: int) -> PrefixKey:
        """The key of the first `num_tokens` tokens."""
        num_whole = num_tokens // self.hash_block_size
        tail = self.tokens(num_whole * self.hash_block_size, num_tokens)
        boundary = self.boundaries()[num_whole]
        return PrefixKey(num_tokens, boundary, tail, self.digest_at(num_tokens))


def _bytes(token_ids: Sequence[TokenId]) -> bytes:
    return array("I", token_ids).tobytes()
