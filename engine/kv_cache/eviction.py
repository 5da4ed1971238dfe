"""What is idle, in the order in which it is to be evicted. Knows no blocks and frees nothing.

GreedyDual (Young 1991): an idle run ranks at the clock plus what it saves per byte, and the clock
moves up to the rank of what goes; so recency and value both count.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.kv_cache.idle_queue import IdleQueue
from engine.kv_cache.run import Rank, Run

BLOCK_WORTH = (
    1.0  # of all blocks, so that the order in which they become idle is that of their rank
)


class EvictionOrder:
    """Idle blocks per group, idle units that hold blocks, and idle checkpoints."""

    def __init__(self, num_groups: int) -> None:
        self.checkpoints = IdleQueue()
        self._runs: tuple[OrderedDict[Run, None], ...] = tuple(
            OrderedDict() for _ in range(num_groups)
        )
        self._units: OrderedDict[int, Rank] = OrderedDict()
        self._clock = 0.0
        self._arrivals = 0

    def add_checkpoint(self, run: Run) -> None:
        """Nobody uses a checkpoint any more."""
        run.rank = self._next_rank(run.worth)
        self.checkpoints.offer(run)

    def add_blocks(self, run: Run, idle_units: Sequence[int]) -> None:
        """Nobody uses a run any more, nor anything else in these units, first to last."""
        run.rank = self._next_rank(BLOCK_WORTH)
        self._runs[run.group][run] = None
        for unit in reversed(idle_units):  # ends before roots
            self._units.pop(unit, None)
            self._units[unit] = run.rank

    def add_unit(self, unit: int) -> None:
        """Nothing in a unit is used any more, but some of it is findable."""
        self._units.pop(unit, None)
        self._units[unit] = self._next_rank(BLOCK_WORTH)

    def remove_blocks(self, run: Run) -> None:
        """A run is used again, or gone."""
        self._runs[run.group].pop(run, None)

    def note_evicted(self, run: Run) -> None:
        """Time goes on."""
        self._clock = max(self._clock, run.rank[0])

    def first_of(self, group: int) -> Run | None:
        """The idle run of a group that is to go first."""
        return next(iter(self._runs[group]), None)

    def first_unit_before(
        self, ranks: Sequence[Rank], is_idle: Callable[[int], bool]
    ) -> int | None:
        """The idle unit that is to go first, if it is before all these.

        Units leave this order only here: many are used again before anybody asks for one.
        """
        while (unit := next(iter(self._units), None)) is not None and not is_idle(unit):
            del self._units[unit]
        if unit is None or any(rank <= self._units[unit] for rank in ranks):
            return None
        return unit

    def check(self, group: int, idle: set[Run], idle_units: set[int]) -> None:
        """Recounts one attention group; raises AssertionError."""
        runs = self._runs[group]
        assert idle == runs.keys()
        ranks = [run.rank for run in runs]
        assert ranks == sorted(ranks)
        assert idle_units <= self._units.keys()

    def _next_rank(self, worth: float) -> Rank:
        self._arrivals += 1
        return self._clock + worth, self._arrivals
