"""Idle checkpoints in the order in which they are to be evicted: the least valuable first."""

import heapq
from collections.abc import Iterator

from engine.kv_cache.run import Rank, Run


class IdleQueue:
    """A heap whose members may leave from anywhere; what has left is skipped when it comes up.

    A run's rank is new each time it comes in, and no two are equal.
    """

    def __init__(self) -> None:
        self._members: set[Run] = set()
        self._heap: list[tuple[Rank, Run]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._members)

    def offer(self, run: Run) -> None:
        """Takes a run in, at its rank."""
        self._members.add(run)
        heapq.heappush(self._heap, (run.rank, run))
        if len(self._heap) > 2 * len(self._members) + 1000:  # most of them have left
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def discard(self, run: Run) -> None:
        """Lets a run go, if it is here."""
        self._members.discard(run)

    def least(self) -> Run | None:
        """The first to be evicted."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def _is_current(self, entry: tuple[Rank, Run]) -> bool:
        rank, run = entry
        return run in self._members and run.rank == rank
