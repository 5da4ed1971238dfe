"""Idle nodes and units, in the order of eviction. Knows no blocks and frees nothing.

GreedyDual (Young 1991): an idle node ranks at the clock plus its value, the tokens it saves per
byte, and the clock moves up to the rank of what goes; so recency and value both count.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from engine.kv_cache.radix_tree import Rank, TreeNode

BLOCK_VALUE = 1.0  # of all blocks; so units rank in the order in which they become idle


class IdleQueue:
    """A heap whose members may leave from anywhere; what has left is skipped when it comes up.

    A node's rank is new each time it comes in, and no two are equal.
    """

    def __init__(self) -> None:
        self.members: set[TreeNode] = set()
        self._heap: list[tuple[Rank, TreeNode]] = []

    def add(self, node: TreeNode) -> None:
        """Takes a node in, at its rank."""
        self.members.add(node)
        heapq.heappush(self._heap, (node.rank, node))
        if len(self._heap) > 2 * len(self.members) + 1000:  # most of them have left
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def first(self) -> TreeNode | None:
        """The member with the least rank."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def _is_current(self, entry: tuple[Rank, TreeNode]) -> bool:
        rank, node = entry
        return node in self.members and node.rank == rank


class EvictionOrder:
    """Idle nodes per group, and idle units of attention groups.

    `units`: those that became idle, first to last. Many are in use again before a unit is needed,
    so they leave this order only when they come first.
    """

    def __init__(self, num_groups: int) -> None:
        self.idle = tuple(IdleQueue() for _ in range(num_groups))
        self.units: OrderedDict[int, Rank] = OrderedDict()
        self._clock = 0.0
        self._arrivals = 0

    def add(self, node: TreeNode) -> None:
        """Nobody uses a node from now on."""
        node.rank = self._next_rank(node.value)
        self.idle[node.group].add(node)

    def add_units(self, units: Sequence[int]) -> None:
        """Nothing in these units, in token order, is used from now on, but some is findable."""
        rank = self._next_rank(BLOCK_VALUE)
        for unit in reversed(units):  # ends before roots
            self.units[unit] = rank
            self.units.move_to_end(unit)

    def remove(self, node: TreeNode) -> None:
        """A node is used again, or gone."""
        self.idle[node.group].members.discard(node)

    def advance(self, node: TreeNode) -> None:
        """A node is evicted: the clock moves up to its rank."""
        self._clock = max(self._clock, node.rank[0])

    def _next_rank(self, value: float) -> Rank:
        self._arrivals += 1
        return self._clock + value, self._arrivals
