"""The nodes that hold each hash block, or each checkpoint, of one KV cache group in one tier.

A set of nodes is an int with one bit for each node, so that one operation asks all of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from serving.kv_events.wire import BlockHash

SLICE: Final = 1024
"""Digests that are worked on in one piece, so that whoever waits for the lock waits shortly."""


class BlockTable:
    """Counts copies: what a node holds twice is gone after it was removed twice.

    `nodes`: digest to the nodes that hold it. `copies`: by bit, the copies of a digest beyond the
    first, which are rare.
    """

    def __init__(self) -> None:
        self.nodes: dict[BlockHash, int] = {}
        self.copies: dict[int, dict[BlockHash, int]] = {}

    def store(self, bit: int, digests: Sequence[BlockHash]) -> int:
        """The node `bit` holds one more copy of each; returns how many it did not hold before."""
        nodes, num_known = self.nodes, 0
        for digest in digests:
            mask = nodes.get(digest)
            if mask is None:
                # The same int object for all: most blocks are on one node, and cost no int.
                nodes[digest] = bit
            elif mask & bit:
                copies = self.copies.setdefault(bit, {})
                copies[digest] = copies.get(digest, 0) + 1
                num_known += 1
            else:
                nodes[digest] = mask | bit
        return len(digests) - num_known

    def remove(self, bit: int, digests: Iterable[BlockHash]) -> int:
        """The node holds one copy less of each; returns how many it holds no longer.

        What the node was never said to hold is passed over.
        """
        nodes, copies, num_gone = self.nodes, self.copies.get(bit), 0
        for digest in digests:
            mask = nodes.get(digest, 0)
            if not mask & bit:
                continue
            if copies and digest in copies:
                copies[digest] -= 1
                if not copies[digest]:
                    del copies[digest]
                continue
            num_gone += 1
            self._take(digest, mask, bit)
        return num_gone

    def sweep(self, bit: int) -> Iterator[None]:
        """Takes a node that is gone out of every digest, one slice after each `next`."""
        self.copies.pop(bit, None)
        # All digests are copied at once, some 10 ms per million: a dict that changes meanwhile
        # cannot be iterated.
        every = list(self.nodes)
        for start in range(0, len(every), SLICE):
            for digest in every[start : start + SLICE]:
                mask = self.nodes.get(digest, 0)
                if mask & bit:
                    self._take(digest, mask, bit)
            yield

    def _take(self, digest: BlockHash, mask: int, bit: int) -> None:
        if mask == bit:
            self._drop(digest)
        else:
            self.nodes[digest] = mask ^ bit

    def _drop(self, digest: BlockHash) -> None:
        del self.nodes[digest]


class CheckpointTable(BlockTable):
    """Checkpoints of one Mamba group, also those that end inside a hash block.

    `tails`: digest of the boundary before such an end to the lengths after it, each with the number
    of digests. The lengths are enough: whoever asks has the tokens, and the digest of boundary and
    tail is exact. Many short prompts differ after one boundary, but only in so many lengths.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tails: dict[BlockHash, dict[int, int]] = {}
        self._ends: dict[BlockHash, tuple[BlockHash, int]] = {}

    def store_inside(self, bit: int, digest: BlockHash, *, boundary: BlockHash, length: int) -> int:
        """As `store`, of a checkpoint `length` tokens after a hash boundary."""
        if digest not in self._ends:
            self._ends[digest] = boundary, length
            lengths = self.tails.setdefault(boundary, {})
            lengths[length] = lengths.get(length, 0) + 1
        return self.store(bit, (digest,))

    def _drop(self, digest: BlockHash) -> None:
        super()._drop(digest)
        if digest not in self._ends:
            return
        boundary, length = self._ends.pop(digest)
        lengths = self.tails[boundary]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self.tails[boundary]


def longest(candidates: Iterable[tuple[int, int]], nodes: int) -> list[tuple[int, int]]:
    """(tokens, nodes) for each length that is the longest of some of `nodes`.

    `candidates`: (tokens, nodes that can have so many), longest first.
    """
    found, rest = [], nodes
    for num_tokens, mask in candidates:
        if got := rest & mask:
            found.append((num_tokens, got))
            rest ^= got
            if not rest:
                break
    return found


def by_name(lengths: Iterable[tuple[int, int]], names: Mapping[int, str]) -> dict[str, int]:
    """Tokens by the name of a node, which `names` has by the number of its bit."""
    found = {}
    for num_tokens, mask in lengths:
        while mask:
            number = mask.bit_length() - 1
            found[names[number]] = num_tokens
            mask ^= 1 << number
    return found
