"""The longest prefix that all KV cache groups can start from: any number, order and mix of groups.

Each kind of group says which prefix lengths it can resume at; the joint hit is the longest length
that all of them accept, so the order of groups cannot matter (vLLM #31707 finds the same fixed
point by shortening). Reads the index only: nothing is referenced, moved or evicted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.prefix_index import PrefixIndex
from engine.kv_cache.spec import MambaSpec, SlidingWindowSpec
from engine.kv_cache.tables import NULL_BLOCK


@dataclass(slots=True, frozen=True)
class PrefixHit:
    """What a request can start from.

    `blocks[g]`: an attention group's blocks in token order (NULL_BLOCK behind a window), the last
    one partly filled when the length is no multiple of its size; a Mamba group's checkpoint, or
    nothing when it takes no part. `junction`: the length that attention alone could start from.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    junction: int


class GroupLookup(ABC):
    """One group's part in the lookup of one request's prefix."""

    def __init__(
        self, index: PrefixIndex, prefix: PrefixDigests, group: int, *, block_size: int
    ) -> None:
        self._index = index
        self._prefix = prefix
        self._group = group
        self._block_size = block_size

    @abstractmethod
    def accepts(self, num_tokens: int) -> bool:
        """Whether this group can resume after `num_tokens` tokens."""

    @abstractmethod
    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        """The blocks to resume from; call only where `accepts` said yes."""

    def _find(self, num_tokens: int) -> int | None:
        return self._index.find(self._group, self._prefix.at(num_tokens))

    def _ends(self, first: int, num_tokens: int) -> list[int]:
        """Where the blocks from block `first` on end, the last one maybe before it is full."""
        size = self._block_size
        return [min(end, num_tokens) for end in range((first + 1) * size, num_tokens + size, size)]


class FullAttentionLookup(GroupLookup):
    """Needs every block; what is missing once stays missing for all longer prefixes."""

    _num_found = 0
    _is_complete = False

    def accepts(self, num_tokens: int) -> bool:
        whole, rest = divmod(num_tokens, self._block_size)
        self._look(whole)
        return self._num_found >= whole and (not rest or self._find(num_tokens) is not None)

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(
            block for end in self._ends(0, num_tokens) if (block := self._find(end)) is not None
        )

    def _look(self, whole: int) -> None:
        while not self._is_complete and self._num_found < whole:
            if self._find((self._num_found + 1) * self._block_size) is None:
                self._is_complete = True
                return
            self._num_found += 1


class SlidingWindowLookup(GroupLookup):
    """Needs the blocks that the next token's window still reaches."""

    def __init__(
        self,
        index: PrefixIndex,
        prefix: PrefixDigests,
        group: int,
        *,
        block_size: int,
        spec: SlidingWindowSpec,
    ) -> None:
        super().__init__(index, prefix, group, block_size=block_size)
        self._spec = spec

    def accepts(self, num_tokens: int) -> bool:
        first = self._spec.first_needed(num_tokens) // self._block_size
        return all(self._find(end) is not None for end in reversed(self._ends(first, num_tokens)))

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        first = self._spec.first_needed(num_tokens) // self._block_size
        found = (self._find(end) for end in self._ends(first, num_tokens))
        return (NULL_BLOCK,) * first + tuple(block for block in found if block is not None)


class MambaLookup(GroupLookup):
    """Needs one checkpoint at exactly that length; the empty prefix needs none."""

    def accepts(self, num_tokens: int) -> bool:
        return num_tokens == 0 or self._find(num_tokens) is not None

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        block = self._find(num_tokens) if num_tokens else None
        return () if block is None else (block,)


class Coordinator:
    """Looks prefixes up for the groups of one plan."""

    def __init__(self, plan: ArenaPlan, index: PrefixIndex) -> None:
        self._plan = plan
        self._index = index

    def find(self, prefix: PrefixDigests, limit: int, *, skip_mamba: bool) -> PrefixHit:
        """The longest joint hit of at most `limit` tokens.

        `skip_mamba` (vLLM #42524): Mamba groups neither constrain nor join it, because their states
        come from elsewhere.
        """
        lookups = [self._lookup(prefix, group) for group in range(len(self._plan.groups))]
        states = [lookup for lookup in lookups if isinstance(lookup, MambaLookup)]
        attention = [lookup for lookup in lookups if lookup not in states]
        junction = self._longest(prefix, limit, attention)
        num_tokens = junction if skip_mamba else self._longest(prefix, junction, lookups)
        blocks = tuple(
            () if skip_mamba and lookup in states else lookup.blocks(num_tokens)
            for lookup in lookups
        )
        return PrefixHit(num_tokens, blocks, junction)

    def _longest(self, prefix: PrefixDigests, limit: int, lookups: Sequence[GroupLookup]) -> int:
        lengths = self._index.lengths(prefix, limit)
        return next(n for n in lengths if all(lookup.accepts(n) for lookup in lookups))

    def _lookup(self, prefix: PrefixDigests, group: int) -> GroupLookup:
        spec, size = self._plan.groups[group].spec, self._plan.block_size_of(group)
        if isinstance(spec, MambaSpec):
            return MambaLookup(self._index, prefix, group, block_size=size)
        if isinstance(spec, SlidingWindowSpec):
            return SlidingWindowLookup(self._index, prefix, group, block_size=size, spec=spec)
        return FullAttentionLookup(self._index, prefix, group, block_size=size)
