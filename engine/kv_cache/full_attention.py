"""Full attention: every token reads all tokens before it, so what is cached is a tree of runs.

A block is findable only while all blocks before it are; so the longest hit is found by bisection
and what follows a lost block goes with it.
"""

from engine.kv_cache.attention_group import BlockLookup, GroupHit, GroupTable
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.prefix_index import partial_key
from engine.kv_cache.run import Run, Units


class FullAttentionLookup(BlockLookup):
    """Can resume after any number of tokens up to the end of what is cached."""

    def __init__(self, pool: BlockPool, prefix: PrefixDigests, group: int) -> None:
        super().__init__(pool, prefix, group)
        digests = prefix.boundaries()[self._stride :: self._stride]
        self._deepest, num_whole = self._index.root.descend(digests)
        self._end = num_whole * self._size
        limit = min(self._end + self._size - 1, prefix.num_tokens)
        self._partial = self._index.longest_partial(prefix, self._end, limit)

    def longest(self, limit: int) -> int:
        return min(limit, self._end if self._partial is None else self._partial[0])

    def hit(self, num_tokens: int) -> GroupHit:
        num_whole, rest = divmod(num_tokens, self._size)
        tip = self._run(num_whole)
        return GroupHit(
            tip.path(num_whole),
            ((tip, num_whole),),
            (self._run(num_whole + 1), num_whole + 1) if rest else None,
        )

    def _run(self, end: int) -> Run:
        """The run that holds the last block before place `end`."""
        if end * self._size > self._end and self._partial is not None:
            return self._partial[1]
        run = self._deepest
        while run.start >= end and run.parent is not None:
            run = run.parent
        return run


class FullAttentionTable(GroupTable):
    """Uses the run at `tip`, and so all runs before that, and the leaf behind it.

    The leaf is a last block that was published while partly filled; it may still become whole.
    `_num_settled`: published blocks, with the leaf. `_own_units`: units of the blocks behind those,
    as long as they are published as they came.
    """

    def __init__(self, pool: BlockPool, group: int, hit: GroupHit) -> None:
        super().__init__(pool, group, hit)
        self._tip = pool.share(*(hit.shares or ((pool.indexes[group].root, 0),))[0])
        self._leaf: Run | None = None
        self._num_settled = self.num_published
        self._own_units: Units | None = {}

    def extend(self, blocks: list[int], units: Units) -> None:
        super().extend(blocks, units)
        if self._own_units is not None:
            for unit, count in units.items():
                self._own_units[unit] = self._own_units.get(unit, 0) + count

    def publish(self, prefix: PrefixDigests, num_tokens: int) -> None:
        first, end = self.num_published, num_tokens // self._size
        if first >= end:
            return
        stride = self._size // prefix.hash_block_size
        digests = prefix.boundaries()[(first + 1) * stride : end * stride + 1 : stride]
        run, num_known = self._tip.descend(digests)
        if num_known:
            self._follow(run, first + num_known)
        elif self._leaf is not None:
            self._complete(self._leaf, digests[0])
            num_known = 1
        as_they_came = not num_known and end == len(self.blocks)
        units = self._own_units if as_they_came else None
        self._own_units = {} if as_they_came else None
        if num_known < len(digests):
            blocks = self.blocks[first + num_known : end]
            self._tip = self._pool.append(self._tip, blocks, digests[num_known:], units=units)
        self.num_published = self._num_settled = end

    def publish_partial(self, prefix: PrefixDigests, num_tokens: int) -> None:
        place, rest = divmod(num_tokens, self._size)
        key = partial_key(prefix, num_tokens)
        if not rest or self._pool.indexes[self._group].find(key) is not None:
            return
        if self._leaf is None:
            self._own_units = None
            self._leaf = self._pool.add_leaf(self._tip, self.blocks[place])
            self._num_settled = place + 1
        self._pool.publish_partial(self._leaf, key)

    def leave(self, num_tokens: int) -> None:
        """Every block is still read."""

    def held(self) -> tuple[list[Run], list[int]]:
        runs = [self._tip] if self._leaf is None else [self._tip, self._leaf]
        return runs, self.blocks[self._num_settled :]

    def _follow(self, run: Run, end: int) -> None:
        """Somebody published equal blocks first: the request goes on with those."""
        self._tip = self._pool.follow(self._tip, run, end)
        if self._leaf is not None:
            self._pool.release(self._leaf)
            self._leaf = None
        own = self.blocks[self._num_settled : end]
        self.blocks[self.num_published : end] = self._tip.path(end)[self.num_published :]
        self._pool.drop(self._group, own)

    def _complete(self, leaf: Run, digest: bytes) -> None:
        self._pool.complete_leaf(leaf, digest)
        self._pool.release(self._tip)
        self._tip, self._leaf = leaf, None
