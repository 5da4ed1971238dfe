"""Who owns which unit, state and block of the arena: two levels, ids only.

A free unit can become one state or a set of small blocks of one group, at run time, in both
directions. States come from the high end and attention units from the low end, so states of
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
        unit, slots = None, self._slots[group]
        blocks: list[int] = []
        units: Units = {}
        if after is not None:
            unit, slot = divmod(after, self.plan.blocks_per_unit[group])
            blocks = slots.fill(unit, count, start=slot + 1)
            if blocks:
                units[unit] = len(blocks)
        while (missing := count - len(blocks)) > 0:
            unit, more = self._fill(group, missing, unit)
            blocks += more
            units[unit] = units.get(unit, 0) + len(more)
        return blocks, units

    def free(self, group: int, blocks: Sequence[int]) -> None:
        """Gives blocks or states back; a unit without any is free for any use again."""
        units = self._slots[group].free(blocks) if group in self._slots else list(blocks)
        for unit in units:
            assert not self._free_units >> unit & 1, f"unit {unit} is freed twice"
            self._free_units |= 1 << unit
        self._num_free_units += len(units)

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

    def _fill(self, group: int, count: int, last: int | None) -> tuple[int, list[int]]:
        """A unit and up to `count` blocks of it, where the request's blocks lie in `last` so far.

        The tightest started unit that holds them all, else a new unit if the count needs any.
        """
        slots = self._slots[group]
        unit = slots.tightest(count)
        if unit is not None:
            return unit, slots.fill(unit, count)
        num_units = self._new_units(group, count)
        if num_units:
            unit = self._take_unit(num_units, last)
            return unit, slots.start(unit, count)
        unit = slots.emptiest()
        return unit, slots.fill(unit, count)

    def _take_unit(self, num_wanted: int, last: int | None) -> int:
        """The unit behind `last` if it is free, else the first of so many adjacent free ones."""
        if last is not None and self._free_units >> last + 1 & 1:
            first = last + 1
        else:
            runs = self._free_units
            for shift in range(1, num_wanted):
                runs &= self._free_units >> shift
            runs = runs or self._free_units
            first = (runs & -runs).bit_length() - 1
        self._free_units &= ~(1 << first)
        self._num_free_units -= 1
        return first

    def _take_states(self, count: int) -> list[int]:
        """The highest free units."""
        states = []
        for _ in range(count):
            states.append(self._free_units.bit_length() - 1)
            self._free_units ^= 1 << states[-1]
        self._num_free_units -= count
        return states
