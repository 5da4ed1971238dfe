"""Who owns which unit, state and block of the arena: two levels, ids only.

A free unit can become one state or a set of small blocks of one group, at run time, in both
directions. States come from the low end and attention units from the high end, so states of
concurrent requests tend to be neighbours (the worker then updates them without copies), and so do
one request's blocks (they then move as one span). Knows nothing of bytes, requests or hashes.
Two-level allocation as in Jenga (SOSP'25).
"""

from collections.abc import Sequence

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.run import Units
from engine.kv_cache.slots import GroupSlots

# Per group: how many new blocks, and the request's last block, behind which they are to lie.
Wants = dict[int, tuple[int, int | None]]


class UnitAllocator:
    """Allocates states and blocks; all-or-nothing is the caller's job through `can_allocate`.

    Bit u of `_free_units`, a Python integer, says that unit u is free.
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self._free_units = (1 << plan.num_units) - 1
        self._num_free_units = plan.num_units
        self._slots = {
            group: GroupSlots(per_unit)
            for group, per_unit in enumerate(plan.blocks_per_unit)
            if group not in plan.state_groups
        }

    @property
    def num_free_units(self) -> int:
        """Units that belong to nobody."""
        return self._num_free_units

    def num_missing_slots(self, group: int, count: int) -> int:
        """How many of `count` blocks the units that an attention group has started cannot hold."""
        return count - self._slots[group].num_free if group in self._slots else 0

    def can_allocate(self, wants: Wants) -> bool:
        """Whether all that is wanted fits at once."""
        needed = 0
        for group, (count, _) in wants.items():
            needed += self._new_units(group, count)
        return needed <= self._num_free_units

    def allocate(self, group: int, count: int, after: int | None) -> tuple[list[int], Units]:
        """`count` blocks or states of `group`, neighbours where possible, and their units.

        `after` is the request's last block: its right neighbour is taken first. Call only when
        `can_allocate` said yes.
        """
        if group not in self._slots:
            states = self._take_states(count)
            return states, dict.fromkeys(states, 1)
        blocks: list[int] = []
        units: Units = {}
        slots = self._slots[group]
        if after is not None:
            unit, slot = divmod(after, self.plan.blocks_per_unit[group])
            blocks = slots.fill(unit, count, start=slot + 1)
            if blocks:
                units[unit] = len(blocks)
        while (missing := count - len(blocks)) > 0:
            for unit, more in self._fill(group, missing):
                blocks += more
                units[unit] = units.get(unit, 0) + len(more)
        return blocks, units

    def free(self, group: int, blocks: Sequence[int]) -> list[int]:
        """Gives blocks or states back; returns the units that are free for any use again."""
        units = self._slots[group].free(blocks) if group in self._slots else list(blocks)
        for unit in units:
            assert not self._free_units >> unit & 1, f"unit {unit} is freed twice"
            self._free_units |= 1 << unit
        self._num_free_units += len(units)
        return units

    def check(self, owned: Sequence[Sequence[int]]) -> None:
        """Recounts everything against `owned[g]`, all blocks in use; raises AssertionError."""
        units: set[int] = set()
        for group, blocks in enumerate(owned):
            assert len(set(blocks)) == len(blocks), f"group {group}: a block has two owners"
            mine = {block // self.plan.blocks_per_unit[group] for block in blocks}
            assert not units & mine, f"group {group} shares units {units & mine}"
            units |= mine
            self._check_slots(group, blocks, mine)
        free = {unit for unit in range(self.plan.num_units) if self._free_units >> unit & 1}
        assert free == set(range(self.plan.num_units)) - units, "free units are miscounted"
        assert len(free) == self._num_free_units

    def _check_slots(self, group: int, blocks: Sequence[int], units: set[int]) -> None:
        if group not in self._slots:
            return
        per_unit = self.plan.blocks_per_unit[group]
        expected = {unit: (1 << per_unit) - 1 for unit in units}
        for block in blocks:
            expected[block // per_unit] &= ~(1 << block % per_unit)
        partly_free = {unit: free for unit, free in expected.items() if free}
        assert self._slots[group].free_bits == partly_free, f"group {group}: slots are miscounted"
        assert self._slots[group].num_free == sum(map(int.bit_count, expected.values()))

    def _new_units(self, group: int, count: int) -> int:
        if group not in self._slots:
            return count
        missing = count - self._slots[group].num_free
        return -(-missing // self.plan.blocks_per_unit[group]) if missing > 0 else 0

    def _fill(self, group: int, count: int) -> list[tuple[int, list[int]]]:
        """(unit, blocks), up to `count` of them.

        In the tightest started unit that holds them, else in new units if the count needs any.
        """
        slots = self._slots[group]
        unit = slots.tightest(count)
        if unit is None:
            num_units = self._new_units(group, count)
            if num_units:
                return self._start_units(slots, num_units, count)
            unit = slots.emptiest()
        return [(unit, slots.fill(unit, count))]

    def _start_units(
        self, slots: GroupSlots, num_units: int, count: int
    ) -> list[tuple[int, list[int]]]:
        started = []
        for unit in self._take_units(num_units, lowest=False):
            started.append((unit, slots.start(unit, count)))
            count -= len(started[-1][1])
        return started

    def _take_states(self, count: int) -> list[int]:
        units: list[int] = []
        while len(units) < count:
            units += self._take_units(count - len(units), lowest=True)
        return units

    def _take_units(self, count: int, *, lowest: bool) -> list[int]:
        """`count` adjacent free units in ascending order, or just one when there is no such run."""
        runs = self._free_units
        for shift in range(1, count):
            runs &= self._free_units >> shift
        if not runs:
            return self._take_units(1, lowest=lowest)
        first = (runs & -runs).bit_length() - 1 if lowest else runs.bit_length() - 1
        self._free_units &= ~(((1 << count) - 1) << first)
        self._num_free_units -= count
        return list(range(first, first + count))
