"""The radix tree of one group's cached blocks. Knows no units, no users and no order of eviction.

A node is a stretch of blocks in token order that are shared, kept and evicted together. Nodes of
full attention form a tree: a prompt that leaves a cached one inside a node splits it there, so a
long shared prefix costs a few steps, not one per block. Blocks of a window and checkpoints stand
alone, and are found by digest.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv_cache.prefix import PrefixDigests, PrefixKey
from engine.types import TokenId

Rank = tuple[float, int]
Units = dict[int, int]  # how many blocks lie in each unit


@dataclass(slots=True, eq=False)
class TreeNode:
    """Blocks of an attention group, or the states of one checkpoint (one unit per Mamba group).

    `start`: index of its first block in a block table. `digests`: of the prefixes that end at each
    hash boundary in its whole blocks; `inner`: in its only block, while that is partly filled.
    `keys`: prefixes that end inside a hash block of its only block, or at its states. `children`:
    nodes right after its end, by the digest of their first block, or by themselves if their one
    block is partly filled. `filled_from`: of a window's block, the first token that it holds, 0 for
    all: a load brings nothing from before the window. `refs`: users, and nodes in use right after
    it. `value`: tokens saved per byte; `rank`: its place in the order of eviction while idle.
    """

    group: int
    start: int
    blocks: list[int]
    units: Units = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)
    inner: tuple[bytes, ...] = ()
    keys: list[PrefixKey] = field(default_factory=list)
    parent: "TreeNode | None" = None
    children: "dict[bytes | TreeNode, TreeNode]" = field(default_factory=dict)
    filled_from: int = 0
    refs: int = 1
    value: float = 1.0
    rank: Rank = (0.0, 0)

    @property
    def end(self) -> int:
        """The index after its last block."""
        return self.start + len(self.blocks)

    @property
    def is_findable(self) -> bool:
        """True if any prefix leads here."""
        return bool(self.digests or self.keys or self.inner)

    def descendants(self) -> list["TreeNode"]:
        """All nodes after its end, parents before children."""
        nodes = list(self.children.values())
        for node in nodes:  # grows while it is read
            nodes += node.children.values()
        return nodes

    def path(self, end: int) -> list[int]:
        """The blocks from the root up to index `end`."""
        parts: list[list[int]] = []
        node: TreeNode | None = self
        while node is not None:
            parts.append(node.blocks[: end - node.start])
            end, node = node.start, node.parent
        blocks: list[int] = []
        for part in reversed(parts):
            blocks += part
        return blocks


class RadixTree:
    """The findable content of one group; of equal prefixes, the first published stays.

    `stride`: hash blocks per block. `root`: the node before all blocks, always in use. `whole`: the
    single blocks of a window, by digest. `inside`: nodes by the digests of the hash boundaries
    inside their first block. `partial`: boundary digest to tail to node, for prefixes that end
    inside a hash block, so that a lookup tries the lengths that exist instead of all.
    """

    def __init__(self, group: int, stride: int) -> None:
        self.stride = stride
        self.root = TreeNode(group, 0, [])
        self.whole: dict[bytes, TreeNode] = {}
        self.inside: dict[bytes, dict[TreeNode, None]] = {}
        self.partial: dict[bytes, dict[tuple[TokenId, ...], TreeNode]] = {}

    def digests(self, prefix: PrefixDigests, start: int, end: int) -> list[bytes]:
        """Digests of the hash blocks in the blocks from index `start` to `end` - 1."""
        return prefix.boundaries()[start * self.stride + 1 : end * self.stride + 1]

    def find(self, key: PrefixKey) -> TreeNode | None:
        """The node with a block or state that ends exactly there."""
        return self.partial.get(key.boundary, {}).get(key.tail)

    def holds(self, key: PrefixKey) -> bool:
        """True if a block is cached that ends exactly there, or that goes on after it."""
        return key.boundary in self.inside if not key.tail else self.find(key) is not None

    def longest_inside(
        self, prefix: PrefixDigests, index: int, needed: int = 0
    ) -> tuple[int, TreeNode] | None:
        """The longest prefix that ends inside the block at `index`, and a node with that block.

        The node holds the block's tokens from `needed` on.
        """
        node, whole = self._longest_listed(prefix, index, needed) if self.inside else (None, 0)
        size = prefix.hash_block_size
        start = (index * self.stride + whole) * size
        limit = min(start + size - 1, prefix.num_tokens)
        found = self.longest_partial(prefix, start, limit, needed=needed)
        return (start, node) if found is None and node is not None else found

    def longest_partial(
        self, prefix: PrefixDigests, above: int, limit: int, *, needed: int = 0
    ) -> tuple[int, TreeNode] | None:
        """The longest prefix of more than `above`, at most `limit` tokens that a key names.

        Its node holds its block's tokens from `needed` on.
        """
        size, digests = prefix.hash_block_size, prefix.boundaries()
        # From the longest boundary down: the first that has a fitting tail is the longest.
        for whole in range(min(limit // size, len(digests) - 1), above // size - 1, -1):
            tails = self.partial.get(digests[whole])
            if tails is None:
                continue
            known = prefix.tokens(whole * size, min(limit, (whole + 1) * size - 1))
            named = (tail for tail in tails if known[: len(tail)] == tail)
            fitting = [tail for tail in named if tails[tail].filled_from <= needed]
            if fitting:
                longest = max(fitting, key=len)
                if whole * size + len(longest) > above:
                    return whole * size + len(longest), tails[longest]
        return None

    def descend(self, node: TreeNode, digests: Sequence[bytes]) -> tuple[TreeNode, int]:
        """(deepest node, number of hash blocks found) on the way down from a node's end.

        `digests`: of the hash boundaries after that end. Enters only nodes whose first block is
        found as a whole.
        """
        found = 0
        while found + self.stride <= len(digests):
            child = node.children.get(digests[found + self.stride - 1])
            if child is None:
                break
            node, known = child, digests[found : found + len(child.digests)]
            if known[-1] == child.digests[len(known) - 1]:
                found += len(known)
                continue
            # A digest stands for all tokens before it: before the first difference all are equal,
            # after it none is. So bisect.
            theirs = child.digests
            found += bisect_left(range(len(known)), True, key=lambda i: known[i] != theirs[i])
            break
        return node, found

    def append(self, node: TreeNode, blocks: list[int], digests: list[bytes]) -> TreeNode:
        """Adds whole blocks after a node's end, for its one user; returns the node they are in."""
        # A node may grow only if its end matters to nobody but the caller.
        if node.refs > 1 or node.children or node.keys:
            child = TreeNode(node.group, node.end, [], parent=node)
            node.children[digests[self.stride - 1]] = child
            if self.stride > 1:
                self._list(child, digests)
            node = child
        node.blocks += blocks
        node.digests += digests
        return node

    def add_partial(self, node: TreeNode, block: int) -> TreeNode:
        """Adds a partly filled block after a node's end."""
        partial = TreeNode(node.group, node.end, [block], parent=node)
        node.children[partial] = partial
        return partial

    def complete(self, partial: TreeNode, digests: list[bytes]) -> None:
        """The block of a node is whole now."""
        if partial.parent is None:
            self.whole[digests[-1]] = partial
        else:
            del partial.parent.children[partial]
            partial.parent.children[digests[-1]] = partial
        if self.stride > 1:
            self._list(partial, digests)
            partial.inner = ()
        partial.digests += digests

    def fill(self, partial: TreeNode, digests: list[bytes]) -> None:
        """More whole hash blocks of a partly filled block are complete."""
        partial.inner += tuple(digests)
        self._list(partial, partial.inner)

    def add_key(self, node: TreeNode, key: PrefixKey) -> None:
        """A prefix that ends in a node, and that no other node has, leads to it."""
        self.partial.setdefault(key.boundary, {})[key.tail] = node
        node.keys.append(key)

    def split(self, node: TreeNode) -> TreeNode:
        """A new node without blocks between a node and its parent; `move_front` fills it.

        parent [0 1 2] --> node [3 4 5 6]    becomes    parent [0 1 2] --> [] --> node [3 4 5 6]
        """
        assert node.parent is not None
        first = node.digests[self.stride - 1]
        between = TreeNode(node.group, node.start, [], parent=node.parent, children={first: node})
        between.refs, between.rank, between.value = int(node.refs > 0), node.rank, node.value
        node.parent.children[first] = between
        node.parent = between
        return between

    def move_front(self, node: TreeNode, count: int) -> None:
        """The first `count` blocks of a node, but not all, move to the end of its parent.

        parent [0 1 2] --> node [3 4 5 6]    becomes, for 2,    parent [0 1 2 3 4] --> node [5 6]
        """
        parent, moved = node.parent, count * self.stride
        assert parent is not None
        del parent.children[node.digests[self.stride - 1]]
        if self.stride > 1:
            self._unlist(node)
            self._list(parent, parent.digests or node.digests)
        parent.blocks += node.blocks[:count]
        parent.digests += node.digests[:moved]
        del node.blocks[:count], node.digests[:moved]
        node.start += count
        parent.children[node.digests[self.stride - 1]] = node
        if self.stride > 1:
            self._list(node, node.digests)

    def may_move_end(self, node: TreeNode, child: TreeNode) -> bool:
        """True if only `child` and one user of the node depend on the node's end."""
        is_alone = len(node.children) == 1 and not node.keys
        return is_alone and child.parent is node and node.refs == 1 + (child.refs > 0)

    def remove(self, node: TreeNode) -> None:
        """Nothing leads to a node from now on; it must have nothing after it."""
        for key in node.keys:
            tails = self.partial[key.boundary]
            del tails[key.tail]
            if not tails:
                del self.partial[key.boundary]
        node.keys.clear()
        if self.stride > 1:
            self._unlist(node)
            node.inner = ()
        if node.parent is not None:
            del node.parent.children[node.digests[self.stride - 1] if node.digests else node]
        elif node.digests:
            del self.whole[node.digests[-1]]

    def _longest_listed(
        self, prefix: PrefixDigests, index: int, needed: int
    ) -> tuple[TreeNode | None, int]:
        """A node with the most hash blocks of the block at `index`, and how many these are."""
        inside, known = self.inside, self.digests(prefix, index, index + 1)[: self.stride - 1]
        # Who holds one boundary holds all before it in the same block. So bisect.
        whole = bisect_left(range(len(known)), True, key=lambda i: known[i] not in inside)
        for count in range(whole, 0, -1):
            for node in inside[known[count - 1]]:
                if node.filled_from <= needed:
                    return node, count
        return None, 0

    def _list(self, node: TreeNode, digests: Sequence[bytes]) -> None:
        """A node begins with these hash boundaries, of which some are inside its first block."""
        for digest in digests[: self.stride - 1]:
            self.inside.setdefault(digest, {})[node] = None

    def _unlist(self, node: TreeNode) -> None:
        for digest in node.inner or node.digests[: self.stride - 1]:
            nodes = self.inside[digest]
            del nodes[node]
            if not nodes:
                del self.inside[digest]
