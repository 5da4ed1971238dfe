"""What each kind of attention group has to answer: lookups, and the life of a request's blocks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block_pool import BlockPool, Share
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.run import Run, Units
from engine.kv_cache.unit_allocator import Wants

NULL_BLOCK = -1  # a block that lies wholly behind its group's window


@dataclass(slots=True, frozen=True)
class GroupHit:
    """What one group has to start from.

    `blocks`: whole blocks in token order, NULL_BLOCK behind a window. `shares`: the runs that hold
    them. `source`: the run that ends with a block of which only a part is wanted, or the states:
    the request gets a copy of them.
    """

    blocks: Sequence[int] = ()
    shares: tuple[Share, ...] = ()
    source: Share | None = None

    @property
    def needs(self) -> tuple[Share, ...]:
        """All runs that must be in use to start from this hit."""
        return self.shares if self.source is None else (*self.shares, self.source)


class Lookup(ABC):
    """One group's part in the lookup of one request's prefix; reads only."""

    @abstractmethod
    def longest(self, limit: int) -> int:
        """The most tokens, at most `limit`, that this group can resume after."""

    @abstractmethod
    def hit(self, num_tokens: int) -> GroupHit:
        """What to resume from; call only for lengths that `longest` returns unchanged."""


class BlockLookup(Lookup):
    """A lookup among blocks: how far does what is cached of each reach?"""

    def __init__(self, pool: BlockPool, prefix: PrefixDigests, group: int) -> None:
        self._index = pool.indexes[group]
        self._prefix = prefix
        self._digests = prefix.boundaries()
        self._size = pool.plan.block_size_of(group)
        self._stride = self._size // prefix.hash_block_size

    def _whole(self, place: int) -> Run | None:
        """The run of the whole block at `place`, whose last token must be known."""
        return self._index.whole.get(self._digests[(place + 1) * self._stride])

    def _find(self, place: int) -> tuple[int, Run] | None:
        """(tokens up to which the block at `place` is cached, its run)."""
        start, end = place * self._size, (place + 1) * self._size
        if end <= self._prefix.num_tokens and (run := self._whole(place)) is not None:
            return end, run
        limit = min(end - 1, self._prefix.num_tokens)
        return self._index.longest_partial(self._prefix, start, limit)


class GroupTable(ABC):
    """One request's blocks of one attention group, in token order.

    `num_published`: whole blocks that are findable, here or as somebody else's equal ones.
    `num_passed`: blocks left behind a window.
    """

    def __init__(self, pool: BlockPool, group: int, hit: GroupHit) -> None:
        """Uses what is hit; the request's own blocks are appended to `blocks` behind it."""
        self.blocks = [*hit.blocks]
        self.num_published = len(self.blocks)
        self.num_passed = 0
        self._pool = pool
        self._group = group
        self._size = pool.plan.block_size_of(group)

    def wants(self, num_tokens: int) -> Wants:
        """The room that is missing for `num_tokens` tokens."""
        missing = -(-num_tokens // self._size) - len(self.blocks)
        if missing <= 0:
            return {}
        has_last = len(self.blocks) > self.num_passed
        return {self._group: (missing, self.blocks[-1] if has_last else None)}

    def extend(self, blocks: list[int], units: Units) -> None:
        """Takes in new blocks of its own; `units`: how many lie in each."""
        self.blocks += blocks

    @abstractmethod
    def publish(self, prefix: PrefixDigests, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: whole blocks become findable."""

    @abstractmethod
    def publish_partial(self, prefix: PrefixDigests, num_tokens: int) -> None:
        """The last block becomes findable at its exact length, if it is not whole."""

    @abstractmethod
    def leave(self, num_tokens: int) -> None:
        """Lets go what no token behind the first `num_tokens` reads."""

    @abstractmethod
    def held(self) -> tuple[list[Run], list[int]]:
        """The runs in use, roots first, and the blocks that no run holds."""
