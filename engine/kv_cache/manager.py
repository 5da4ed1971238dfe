"""What the scheduler asks of the KV cache: grow a request's tables, free them, count what is left.

The simple occupant of this room: no block is shared between requests yet. All-or-nothing without
side effects on failure. Torch-free.
"""

from collections.abc import Iterable

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec
from engine.kv_cache.tables import BlockTables
from engine.kv_cache.unit_allocator import UnitAllocator


class KVCacheManager:
    """Owner of all units of one arena."""

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self._allocator = UnitAllocator(plan)
        self._live: dict[int, BlockTables] = {}
        self._new_states: list[tuple[int, int]] = []

    @property
    def usage(self) -> float:
        """Share of units that belong to somebody, 0 to 1."""
        return 1.0 - self._allocator.num_free_units / self.plan.num_units

    @property
    def num_free_units(self) -> int:
        """Units that belong to nobody."""
        return self._allocator.num_free_units

    @property
    def num_states(self) -> int:
        """Mamba states in use."""
        return sum(
            len(tables.groups[group])
            for tables in list(self._live.values())  # also read from a thread that scrapes metrics
            for group in range(len(self.plan.groups))
            if self._is_state(group)
        )

    def allocate(self, tables: BlockTables | None, num_tokens: int) -> BlockTables | None:
        """`tables` (None: of a new request) grown to hold `num_tokens` tokens.

        None when the arena has no room; nothing has changed then.
        """
        owned = tables.groups if tables else tuple([] for _ in self.plan.groups)
        counts = [
            max(0, self.plan.blocks_for(group, num_tokens) - len(blocks))
            for group, blocks in enumerate(owned)
        ]
        if not self._allocator.can_allocate(counts):
            return None
        grown = tables or BlockTables(tuple([] for _ in self.plan.groups))
        self._live[id(grown)] = grown
        for group, count in enumerate(counts):
            self._grow(group, grown.groups[group], count)
        return grown

    def free(self, tables: BlockTables) -> None:
        """Gives all blocks and states of one request back, at once."""
        del self._live[id(tables)]
        for group, blocks in enumerate(tables.groups):
            self._allocator.free(group, blocks)
            self._new_states = [
                state for state in self._new_states if state[0] != group or state[1] not in blocks
            ]

    def take_new_states(self) -> tuple[tuple[int, int], ...]:
        """(group, state) allocated since the last call; the worker zeroes them before use."""
        new, self._new_states = tuple(self._new_states), []
        return new

    def check(self) -> None:
        """Recounts every unit and block; raises AssertionError on any difference."""
        self._allocator.check([self._owned(group) for group in range(len(self.plan.groups))])

    def _owned(self, group: int) -> list[int]:
        tables: Iterable[BlockTables] = self._live.values()
        return [block for table in tables for block in table.groups[group]]

    def _grow(self, group: int, blocks: list[int], count: int) -> None:
        if not count:
            return
        new = self._allocator.allocate(group, count, blocks[-1] if blocks else None)
        blocks += new
        if self._is_state(group):
            self._new_states += [(group, state) for state in new]

    def _is_state(self, group: int) -> bool:
        return isinstance(self.plan.groups[group].spec, MambaSpec)
