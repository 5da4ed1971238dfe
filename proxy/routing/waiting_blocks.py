"""Blocks that an engine announced before what they follow: kept for a while, within bounds."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from serving.kv_events.wire import BlockHash, BlockStored

MAX_WEIGHT: Final = 2**18
"""Tokens and hashes that wait at most; some 10 MB. The oldest go first."""
MAX_GONE: Final = 2**16


class Later(NamedTuple):
    """An event as of a moment; blocks that were removed after it are gone from it."""

    event: BlockStored
    moment: int


class WaitingBlocks:
    """By the hash that is needed, the events that wait for it. `drop` hears of blocks given up."""

    def __init__(self, drop: Callable[[int], None]) -> None:
        self._drop = drop
        self._by_need: dict[BlockHash, list[Later]] = {}
        self._weight = 0
        self._moment = 0
        self._gone: dict[tuple[int, str, BlockHash], int] = {}

    def later(self, event: BlockStored) -> Later:
        """The event as of now."""
        return Later(event, self._moment)

    def add(self, need: BlockHash, later: Later) -> None:
        """Keep an event until `need` has a place."""
        self._by_need.setdefault(need, []).append(later)
        self._weight += _weight(later)
        while self._weight > MAX_WEIGHT:
            self._give_up(next(iter(self._by_need)))

    def take(self, known: BlockHash) -> list[Later]:
        """The events that waited for a hash, which wait no more."""
        taken = self._by_need.pop(known, [])
        self._weight -= sum(map(_weight, taken))
        return taken

    def remove(self, group: int, tier: str, hashes: Iterable[BlockHash]) -> None:
        """These blocks are gone, also those of them that wait."""
        if not self._by_need:
            self._gone.clear()
            return
        self._moment += 1
        self._gone.update(((group, tier, each), self._moment) for each in hashes)
        if len(self._gone) > MAX_GONE:
            self.clear()

    def is_gone(self, later: Later, tier: str, block_hash: BlockHash) -> bool:
        """True if the block was removed after its event."""
        group = later.event.group_idx or 0
        return self._gone.get((group, tier, block_hash), -1) > later.moment

    def clear(self) -> None:
        """Give up everything."""
        for need in list(self._by_need):
            self._give_up(need)
        self._gone.clear()

    def _give_up(self, need: BlockHash) -> None:
        self._drop(sum(len(later.event.block_hashes) for later in self.take(need)))


def _weight(later: Later) -> int:
    return 1 + len(later.event.token_ids) + len(later.event.block_hashes)
