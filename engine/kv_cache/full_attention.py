"""Full attention: every token reads all tokens before it, so what is cached is a radix tree.

A block is findable only while all blocks before it are; so the longest hit is found by descending
the tree, and what follows a lost block goes with it.
"""

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.radix_tree import TreeNode
from engine.kv_cache.tables import GroupHit, GroupTable, Lookup


class FullAttentionLookup(Lookup):
    """Can resume after any number of tokens up to the end of what is cached."""

    def __init__(self, pool: BlockPool, prefix: PrefixDigests, group: int) -> None:
        tree, self._size = pool.trees[group], pool.plan.block_size_of(group)
        self._deepest, found = tree.descend(tree.root, prefix.boundaries()[1:])
        num_whole, inside = divmod(found, tree.stride)
        self._end = num_whole * self._size
        if not inside:
            self._partial = tree.longest_inside(prefix, num_whole)
        else:
            # The next block is the deepest node's own: no other node begins after the same blocks.
            self._partial = found * prefix.hash_block_size, self._deepest

    def longest(self, limit: int) -> int:
        return min(limit, self._end if self._partial is None else self._partial[0])

    def hit(self, num_tokens: int) -> GroupHit:
        num_whole, rest = divmod(num_tokens, self._size)
        last = self._node(num_whole)
        return GroupHit(
            last.path(num_whole),
            ((last, num_whole),),
            (self._node(num_whole + 1), num_whole + 1) if rest else None,
        )

    def _node(self, end: int) -> TreeNode:
        """The node with the last block before index `end`."""
        if end * self._size > self._end and self._partial is not None:
            return self._partial[1]
        node = self._deepest
        # The descent ended in the deepest node; shorter hits end in one of its ancestors.
        while node.start >= end and node.parent is not None:
            node = node.parent
        return node


class FullAttentionTable(GroupTable):
    """Uses the node with its last published block, and with it all nodes before that.

        blocks   [ 0 .. num_published )  [ partial ]  [ _num_settled .. )
        owner    `_last` and its path     `_partial`   private

    `_partial`: the node of a last block that was published while partly filled, if there is one.
    """

    def __init__(self, pool: BlockPool, group: int, hit: GroupHit) -> None:
        super().__init__(pool, group, hit)
        self._last = pool.share(*(hit.shares or ((self._tree.root, 0),))[0])
        self._partial: TreeNode | None = None
        self._num_settled = self.num_published

    def publish(self, prefix: PrefixDigests, num_tokens: int) -> None:
        first, end = self.num_published, num_tokens // self._size
        if first >= end:
            return
        # Whole blocks that others have published since then replace the request's own.
        stride, digests = self._tree.stride, self._tree.digests(prefix, first, end)
        node, num_found = self._tree.descend(self._last, digests)
        if num_known := num_found // stride:
            self._follow(node, first + num_known)
        elif self._partial is not None:
            self._pool.complete(self._partial, digests[:stride], prefix)
            self._pool.release(self._last)
            self._last, self._partial, num_known = self._partial, None, 1
        if (start := first + num_known) < end:
            # Mostly the newest ones, whose units are known.
            blocks, (newest, units) = self.blocks[start:end], self._newest
            if start != newest or end != len(self.blocks):
                units = self._pool.units.units_of(self._group, blocks)
            new, digests = (blocks, units), digests[num_known * stride :]
            self._last = self._pool.append(self._last, new, digests, prefix=prefix)
        self.num_published = self._num_settled = end

    def publish_partial(self, prefix: PrefixDigests, num_tokens: int) -> None:
        index, rest = divmod(num_tokens, self._size)
        if not rest or self._tree.holds(key := prefix.key(num_tokens)):
            return
        if self._partial is None:
            self._partial = self._pool.add_partial(self._last, self.blocks[index])
            self._num_settled = index + 1
        self._pool.publish_partial(self._partial, prefix, key)

    def leave(self, num_tokens: int, filled_from: int | None = None) -> None:
        """Every block is still read."""

    def held(self) -> tuple[list[TreeNode], list[int]]:
        nodes = [self._last] if self._partial is None else [self._last, self._partial]
        return nodes, self.blocks[self._num_settled :]

    def _follow(self, node: TreeNode, end: int) -> None:
        """Somebody published equal blocks first: the request goes on with those."""
        self._last = self._pool.follow(self._last, node, end)
        if self._partial is not None:
            self._pool.release(self._partial)
            self._partial = None
        # Equal bytes twice would only take room: the request's own blocks are freed.
        own = self.blocks[self._num_settled : end]
        self.blocks[self.num_published : end] = self._last.path(end)[self.num_published :]
        self._pool.free(self._group, own)
