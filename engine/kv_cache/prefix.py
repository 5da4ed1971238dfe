"""Digests of token prefixes: what blocks and checkpoints are found by, on every node and machine.

The digest of a prefix is chained over hash blocks of `hash_block_size` tokens; the last, possibly
shorter, block gives the digest of any length in between. The root carries the cluster's seed and
the request's salt, so equal text under different salts never meets. Torch-free.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from engine.types import TokenId

DIGEST_BYTES = 32


class PrefixHasher:
    """The hash function of one cluster: equal seeds give equal digests in every process."""

    def __init__(self, hash_block_size: int, seed: str = "") -> None:
        self.hash_block_size = hash_block_size
        self._seed = seed

    def root(self, cache_salt: str | None) -> bytes:
        """The digest of the empty prefix under `cache_salt`."""
        parts = (self._seed.encode(), b"" if cache_salt is None else b"=" + cache_salt.encode())
        return sha256(b"".join(sha256(part).digest() for part in parts)).digest()

    def extend(self, parent: bytes, token_ids: Sequence[TokenId]) -> bytes:
        """The digest of `parent`'s prefix followed by at most one hash block of tokens."""
        return sha256(parent + array("I", token_ids).tobytes()).digest()


class PrefixDigests:
    """Digests of all prefixes of one request's tokens, computed once, when they are asked for.

    Holds the request's own token list: prefixes grow as it generates.
    """

    def __init__(
        self, hasher: PrefixHasher, token_ids: list[TokenId], cache_salt: str | None
    ) -> None:
        self._hasher = hasher
        self._token_ids = token_ids
        self._chain = [hasher.root(cache_salt)]

    @property
    def hash_block_size(self) -> int:
        """Tokens per hash block."""
        return self._hasher.hash_block_size

    def at(self, num_tokens: int) -> bytes:
        """The digest of the first `num_tokens` tokens; IndexError beyond the known ones."""
        if num_tokens > len(self._token_ids):
            raise IndexError(f"{num_tokens} tokens asked for, {len(self._token_ids)} known")
        whole, rest = divmod(num_tokens, self.hash_block_size)
        while len(self._chain) <= whole:
            start = (len(self._chain) - 1) * self.hash_block_size
            block = self._token_ids[start : start + self.hash_block_size]
            self._chain.append(self._hasher.extend(self._chain[-1], block))
        if not rest:
            return self._chain[whole]
        return self._hasher.extend(self._chain[whole], self.tail(num_tokens))

    def tail(self, num_tokens: int) -> tuple[TokenId, ...]:
        """The tokens of the first `num_tokens` that lie behind their last hash boundary."""
        start = num_tokens - num_tokens % self.hash_block_size
        return tuple(self._token_ids[start:num_tokens])
