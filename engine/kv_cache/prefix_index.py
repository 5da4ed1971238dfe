"""Which run holds what prefix, for one group. Knows no reference counts.

Whole blocks are found by the digest of the prefix that they end: those of full attention on the way
down a tree, those of a window one by one. What ends elsewhere (a partly filled block, the states of
a checkpoint) is listed under the hash boundary before its end with the few tokens behind it, so
that a lookup tries the lengths that exist instead of all.
"""

from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.run import PartialKey, Run
from engine.types import TokenId


def partial_key(prefix: PrefixDigests, num_tokens: int) -> PartialKey:
    """The key of the first `num_tokens` tokens."""
    whole = num_tokens // prefix.hash_block_size
    boundary = whole * prefix.hash_block_size
    return PartialKey(prefix.boundaries()[whole], prefix.tail(boundary, num_tokens))


class PrefixIndex:
    """One group's findable prefixes; of equal ones, the first published stays.

    `root`: the tree of full-attention blocks, itself always in use. `whole`: digest to run of the
    single blocks of a window. `partial`: boundary digest to tails to runs.
    """

    def __init__(self, group: int) -> None:
        self.root = Run(group, 0, [])
        self.whole: dict[bytes, Run] = {}
        self.partial: dict[bytes, dict[tuple[TokenId, ...], Run]] = {}

    def __len__(self) -> int:
        in_tree = self.root.following
        for run in in_tree:
            in_tree += run.following
        in_tree_whole = sum(len(run.digests) for run in in_tree)
        return in_tree_whole + len(self.whole) + sum(map(len, self.partial.values()))

    def find(self, key: PartialKey) -> Run | None:
        """The run whose content ends exactly there."""
        return self.partial.get(key.boundary, {}).get(key.tail)

    def add(self, key: PartialKey, run: Run) -> bool:
        """False when the key is taken."""
        tails = self.partial.setdefault(key.boundary, {})
        return tails.setdefault(key.tail, run) is run

    def forget(self, run: Run) -> None:
        """Nothing leads to a run any more; it must have nothing behind it."""
        for key in run.partial_keys:
            self._forget_key(key)
        run.partial_keys.clear()
        if run.parent is None:
            for digest in run.digests:
                del self.whole[digest]
        elif run.digests:
            del run.parent.children[run.digests[0]]
        else:
            run.parent.leaves.remove(run)

    def _forget_key(self, key: PartialKey) -> None:
        tails = self.partial[key.boundary]
        del tails[key.tail]
        if not tails:
            del self.partial[key.boundary]

    def longest_partial(
        self, prefix: PrefixDigests, above: int, limit: int
    ) -> tuple[int, Run] | None:
        """The longest prefix of more than `above`, at most `limit` tokens that a key names."""
        size, digests = prefix.hash_block_size, prefix.boundaries()
        lowest = above // size
        for whole in range(min(limit // size, len(digests) - 1), lowest - 1, -1):
            if digests[whole] not in self.partial:
                continue
            boundary = whole * size
            found = self._longest_tail(prefix, boundary, min(limit, boundary + size - 1))
            if found is not None and found[0] > above:
                return found
        return None

    def _longest_tail(
        self, prefix: PrefixDigests, boundary: int, limit: int
    ) -> tuple[int, Run] | None:
        tails = self.partial[prefix.boundaries()[boundary // prefix.hash_block_size]]
        known = prefix.tail(boundary, limit)
        fitting = [tail for tail in tails if known[: len(tail)] == tail]
        if not fitting:
            return None
        longest = max(fitting, key=len)
        return boundary + len(longest), tails[longest]
