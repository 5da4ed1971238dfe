"""A request's blocks in each KV cache group, and the interfaces of attention groups."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool, Path
from engine.kv_cache.checkpoints import Reason
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.radix_tree import TreeNode, Units
from engine.kv_cache.unit_allocator import Allocated, NewBlocks

NULL_BLOCK = -1  # a block that lies wholly before its group's window


class BlockCopy(NamedTuple):
    """The worker copies a block or state before it computes anything else."""

    group: int
    source: int
    target: int


class GroupHit(NamedTuple):
    """The cached part of one group that a request starts from.

    `blocks`: whole blocks in token order, NULL_BLOCK before a window. `shares`: the paths with
    them. `source`: the path to a block of which only a part is wanted, or to states: the request
    gets a copy of its last block, or of the states.
    """

    blocks: Sequence[int] = ()
    shares: tuple[Path, ...] = ()
    source: Path | None = None

    @property
    def needs(self) -> tuple[Path, ...]:
        """All that must be in use to start from this hit."""
        return self.shares if self.source is None else (*self.shares, self.source)


class Lookup(ABC):
    """One group's part in the lookup of one request's prefix; reads only."""

    @abstractmethod
    def longest(self, limit: int) -> int:
        """The most tokens, at most `limit`, that this group can resume after."""

    @abstractmethod
    def hit(self, num_tokens: int) -> GroupHit:
        """The hit of `num_tokens`; call only for lengths that `longest` returns unchanged."""


class GroupTable(ABC):
    """One request's blocks of one attention group, in token order.

    `num_published`: whole blocks that are findable, here or as somebody else's equal ones.
    `num_passed`: blocks before the window. `filled_from`: the first token that its blocks hold, 0
    for all: a load may have left the front of a window's first block empty.
    """

    def __init__(self, pool: BlockPool, group: int, hit: GroupHit) -> None:
        """Uses what is hit; `take` appends the request's own blocks to `blocks` after it."""
        self.blocks = [*hit.blocks]
        self.num_published = len(self.blocks)
        self.num_passed = 0
        self.filled_from = 0
        self._newest: tuple[int, Units] = 0, {}  # index and units of the newest blocks
        self._pool = pool
        self._tree = pool.trees[group]
        self._group = group
        self._size = pool.plan.block_size_of(group)

    def missing(self, num_tokens: int) -> NewBlocks:
        """The new blocks that `num_tokens` tokens need."""
        count = -(-num_tokens // self._size) - len(self.blocks)
        if count <= 0:
            return {}
        has_last = len(self.blocks) > self.num_passed
        return {self._group: (count, self.blocks[-1] if has_last else None)}

    def take(self, new: Allocated) -> None:
        """New private blocks follow the last one."""
        blocks, units = new
        self._newest = len(self.blocks), units
        self.blocks += blocks

    @abstractmethod
    def publish(self, prefix: PrefixDigests, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: whole blocks become findable."""

    @abstractmethod
    def publish_partial(self, prefix: PrefixDigests, num_tokens: int) -> None:
        """The last block becomes findable at its exact length, if it is not whole."""

    @abstractmethod
    def leave(self, num_tokens: int, filled_from: int | None = None) -> None:
        """Frees what no token after the first `num_tokens` reads.

        `filled_from`: after a load, the first token that it has filled in, 0 for all of its blocks.
        """

    @abstractmethod
    def held(self) -> tuple[list[TreeNode], list[int]]:
        """The nodes in use, roots first, and the blocks that no node holds."""


@dataclass(slots=True)
class BlockTables:
    """One request's blocks and states, which the worker and the connector read.

    `groups[g]` lists an attention group's blocks in token order, or a Mamba group's state.
    `attention[g]`: the table of attention group g. `state`: the states of all Mamba groups.
    `num_checkpointed`: tokens up to the last checkpoint that the request started from or made.
    `num_hit`: tokens that it started from. `checkpoints`: positions in the prompt where states are
    to be kept, ascending, and why.
    """

    groups: tuple[list[int], ...]
    attention: dict[int, GroupTable]
    state: TreeNode | None
    num_checkpointed: int = 0
    num_hit: int = 0
    checkpoints: dict[int, Reason] = field(default_factory=dict)

    def used(self, group: int) -> list[int]:
        """The group's blocks without those that lie before its window."""
        return [block for block in self.groups[group] if block != NULL_BLOCK]
