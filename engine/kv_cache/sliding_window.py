"""Sliding-window attention: a token reads only the last ones, so blocks are found one by one.

Blocks before the window are freed while the request goes on; what is cached may have holes.
"""

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.radix_tree import TreeNode
from engine.kv_cache.spec import SlidingWindowSpec
from engine.kv_cache.tables import NULL_BLOCK, GroupHit, GroupTable, Lookup


class SlidingWindowLookup(Lookup):
    """Can resume where all blocks that the next token's window reaches are cached far enough."""

    def __init__(self, pool: BlockPool, prefix: PrefixDigests, group: int) -> None:
        self._tree, self._prefix = pool.trees[group], prefix
        self._size = pool.plan.block_size_of(group)
        self._spec = _spec(pool, group)
        self._found: dict[tuple[int, int], tuple[int, TreeNode] | None] = {}

    def longest(self, limit: int) -> int:
        while limit and (gap := self._last_gap(limit)) is not None:
            limit = gap
        return limit

    def hit(self, num_tokens: int) -> GroupHit:
        num_whole, rest = divmod(num_tokens, self._size)
        # Blocks before the window are never read: the null block stands for them.
        #
        #   index    0 .. first - 1     first .. num_whole - 1    num_whole
        #   block    NULL_BLOCK         cached, shared            copy of a partly filled one
        needed = self._spec.first_needed(num_tokens)
        first = needed // self._size
        nodes = [self._node(index, needed) for index in range(first, num_whole)]
        blocks = [NULL_BLOCK] * first + [node.blocks[0] for node in nodes]
        shares = tuple((node, node.end) for node in nodes)
        source = (self._node(num_whole, needed), num_whole + 1) if rest else None
        return GroupHit(blocks, shares, source)

    def _last_gap(self, num_tokens: int) -> int | None:
        """The end of the last block that is not cached far enough for `num_tokens` tokens."""
        needed = self._spec.first_needed(num_tokens)
        for index in range((num_tokens - 1) // self._size, needed // self._size - 1, -1):
            found, start = self._find(index, needed), index * self._size
            end = start if found is None else found[0]
            if end < min(num_tokens, start + self._size):
                return end
        return None

    def _find(self, index: int, needed: int) -> tuple[int, TreeNode] | None:
        """(tokens up to which the block at `index` is cached, its node); looked up once.

        The node holds the block's tokens from `needed` on.
        """
        key = index, max(needed, index * self._size)
        if key not in self._found:
            end, node = (index + 1) * self._size, None
            if end <= self._prefix.num_tokens:
                digests = self._tree.digests(self._prefix, index, index + 1)
                node = self._tree.whole.get(digests[-1])
            if node is not None and node.filled_from <= key[1]:
                self._found[key] = end, node
            else:
                self._found[key] = self._tree.longest_inside(self._prefix, *key)
        return self._found[key]

    def _node(self, index: int, needed: int) -> TreeNode:
        found = self._find(index, needed)
        assert found is not None, f"block {index} is not cached"
        return found[1]


class SlidingWindowTable(GroupTable):
    """Uses the node of each of its blocks that is findable; `_nodes` has them by block index.

    tokens         64      80      96  105  112     128     144     a load of 144, window 40
    P's blocks                     |=======|=======|=======|        of 16: it has freed others
    blocks of 64   |    nothing    |=======================|        filled from 96 on
    """

    def __init__(self, pool: BlockPool, group: int, hit: GroupHit) -> None:
        super().__init__(pool, group, hit)
        self._spec = _spec(pool, group)
        self._nodes = {node.start: pool.share(node, end) for node, end in hit.shares}
        self.num_passed = len(hit.blocks) - len(hit.shares)
        # Only the first block may lack its front; what comes after it begins later.
        first = hit.needs[0][0] if hit.needs else None
        self.filled_from = 0 if first is None else first.filled_from

    def publish(self, prefix: PrefixDigests, num_tokens: int) -> None:
        # What was passed before it was published has never been filled in.
        first = max(self.num_published, self.num_passed)
        for index in range(first, num_tokens // self._size):
            digests = self._tree.digests(prefix, index, index + 1)
            if digests[-1] not in self._tree.whole:
                self._pool.complete(self._own_node(index), digests, prefix)
        self.num_published = max(self.num_published, num_tokens // self._size)

    def publish_partial(self, prefix: PrefixDigests, num_tokens: int) -> None:
        index, rest = divmod(num_tokens, self._size)
        if rest and not self._tree.holds(key := prefix.key(num_tokens)):
            self._pool.publish_partial(self._own_node(index), prefix, key)

    def leave(self, num_tokens: int, filled_from: int | None = None) -> None:
        if filled_from is not None:  # a shared first block may lack more than the load
            self.filled_from = max(self.filled_from, filled_from)
        num_passed = self._spec.first_needed(num_tokens) // self._size
        for index in range(self.num_passed, num_passed):
            block, self.blocks[index] = self.blocks[index], NULL_BLOCK
            node = self._nodes.pop(index, None)
            if node is None:
                self._pool.free(self._group, [block])
            else:
                self._pool.release(node)
        self.num_passed = max(self.num_passed, num_passed)

    def held(self) -> tuple[list[TreeNode], list[int]]:
        indexes = range(self.num_passed, len(self.blocks))
        own = [self.blocks[index] for index in indexes if index not in self._nodes]
        return [self._nodes[index] for index in sorted(self._nodes)], own

    def _own_node(self, index: int) -> TreeNode:
        if index not in self._nodes:
            node = self._pool.add_node(self._group, index, [self.blocks[index]])
            if self.filled_from > index * self._size:
                node.filled_from = self.filled_from
            self._nodes[index] = node
        return self._nodes[index]


def _spec(pool: BlockPool, group: int) -> SlidingWindowSpec:
    spec = pool.plan.groups[group].spec
    assert isinstance(spec, SlidingWindowSpec)
    return spec
