"""Which block or state holds what prefix: digests to blocks, per group. Knows no reference counts.

Entries whose prefix ends between two hash boundaries are also listed under the boundary before
them, so that a lookup tries the few lengths that exist instead of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.kv_cache.prefix import PrefixDigests
from engine.types import TokenId


@dataclass(slots=True, frozen=True)
class PrefixKey:
    """One published prefix: its digest, and where it hangs when it ends between hash boundaries."""

    digest: bytes
    boundary: bytes
    tail: tuple[TokenId, ...] = ()

    @classmethod
    def of(cls, prefix: PrefixDigests, num_tokens: int) -> "PrefixKey":
        """The key of the first `num_tokens` tokens."""
        tail = prefix.tail(num_tokens)
        return cls(prefix.at(num_tokens), prefix.at(num_tokens - len(tail)), tail)


@dataclass(slots=True)
class PrefixIndex:
    """`(group, digest) -> block`, one block per key: the first one published stays."""

    _blocks: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _tails: dict[bytes, dict[tuple[TokenId, ...], int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, group: int, digest: bytes) -> int | None:
        """The block of `group` whose content ends with this prefix."""
        return self._blocks.get((group, digest))

    def add(self, group: int, key: PrefixKey, block: int) -> bool:
        """False when the key is taken."""
        if (group, key.digest) in self._blocks:
            return False
        self._blocks[group, key.digest] = block
        if key.tail:
            tails = self._tails.setdefault(key.boundary, {})
            tails[key.tail] = tails.get(key.tail, 0) + 1
        return True

    def remove(self, group: int, key: PrefixKey) -> None:
        """Forgets one entry."""
        del self._blocks[group, key.digest]
        if key.tail:
            tails = self._tails[key.boundary]
            tails[key.tail] -= 1
            if not tails[key.tail]:
                del tails[key.tail]
            if not tails:
                del self._tails[key.boundary]

    def lengths(self, prefix: PrefixDigests, limit: int) -> Iterator[int]:
        """Prefix lengths up to `limit`, longest first, at which anything could be found."""
        size = prefix.hash_block_size
        for boundary in range(limit - limit % size, -1, -size):
            room = min(size - 1, limit - boundary)
            for tail in self._matching_tails(prefix, boundary, room):
                yield boundary + tail
            yield boundary

    def _matching_tails(self, prefix: PrefixDigests, boundary: int, room: int) -> list[int]:
        tails = self._tails.get(prefix.at(boundary))
        if not tails:
            return []
        following = prefix.tail(boundary + room) if room else ()
        return sorted((len(t) for t in tails if following[: len(t)] == t and t), reverse=True)
