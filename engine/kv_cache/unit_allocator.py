"""Who owns which unit, state and block of the arena: two levels, ids only.

A free unit can become one state or a set of small blocks of one group, at run time, in both
directions. States come from the low end and attention units from the high end, so states of
concurrent requests tend to be neighbours (the worker then updates them without copies), and so do
one request's blocks (they then move as one span). Knows nothing of bytes, requests or hashes.
Two-level allocation as in Jenga (SOSP'25).
"""

from collections.abc import Iterable, Sequence

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec


class UnitAllocator:
    """Allocates states and blocks; all-or-nothing is the caller's job through `can_allocate`.

    Bit sets are Python integers: bit u of `_free_units` says that unit u is free, bit s of
    `_slots[g][u]` that slot s of unit u, owned by attention group g, is free.
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self._free_units = (1 << plan.num_units) - 1
        self._num_free_units = plan.num_units
        self._slots: tuple[dict[int, int], ...] = tuple({} for _ in plan.groups)
        self._num_free_slots = [0] * len(plan.groups)
        self._is_state = tuple(isinstance(group.spec, MambaSpec) for group in plan.groups)

    @property
    def num_free_units(self) -> int:
        """Units that belong to nobody."""
        return self._num_free_units

    def num_free_slots(self, group: int) -> int:
        """Free blocks in the units that an attention group has started."""
        return self._num_free_slots[group]

    def can_allocate(self, counts: Sequence[int]) -> bool:
        """Whether `counts[g]` more blocks or states of every group fit at once."""
        return sum(map(self._new_units, range(len(counts)), counts)) <= self._num_free_units

    def allocate(self, group: int, count: int, after: int | None = None) -> list[int]:
        """`count` blocks (or one state) of `group`, neighbours where possible.

        `after` is the request's last block: its right neighbour is taken first. Call only when
        `can_allocate` said yes.
        """
        if self._is_state[group]:
            return [self._take_units(1, lowest=True)[0] for _ in range(count)]
        blocks = self._extend(group, count, after)
        while len(blocks) < count:
            unit = self._pick_unit(group, count - len(blocks))
            blocks += self._fill(group, unit, count - len(blocks))
        return blocks

    def free(self, group: int, blocks: Iterable[int]) -> None:
        """Gives blocks or states back; a unit whose last block goes is free for any use again."""
        if self._is_state[group]:
            for unit in blocks:
                self._give_unit(unit)
            return
        for block in blocks:
            self._free_slot(group, *divmod(block, self.plan.blocks_per_unit[group]))

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
        if self._is_state[group]:
            return
        per_unit = self.plan.blocks_per_unit[group]
        expected = {unit: (1 << per_unit) - 1 for unit in units}
        for block in blocks:
            expected[block // per_unit] &= ~(1 << block % per_unit)
        assert self._slots[group] == expected, f"group {group}: slots are miscounted"
        assert self._num_free_slots[group] == sum(map(int.bit_count, expected.values()))

    def _new_units(self, group: int, count: int) -> int:
        missing = max(0, count - self._num_free_slots[group])
        return -(-missing // self.plan.blocks_per_unit[group])

    def _extend(self, group: int, count: int, after: int | None) -> list[int]:
        if after is None:
            return []
        unit, slot = divmod(after, self.plan.blocks_per_unit[group])
        return self._fill(group, unit, count, start=slot + 1)

    def _fill(self, group: int, unit: int, count: int, *, start: int = 0) -> list[int]:
        """Up to `count` consecutive slots of `unit`, from the first free one not below `start`."""
        free = self._slots[group].get(unit, 0) >> start << start
        if not free or (start and not free >> start & 1):
            return []
        first = (free & -free).bit_length() - 1
        run = _trailing_ones(free >> first)
        taken = min(run, count)
        self._slots[group][unit] &= ~(((1 << taken) - 1) << first)
        self._num_free_slots[group] -= taken
        base = unit * self.plan.blocks_per_unit[group] + first
        return list(range(base, base + taken))

    def _pick_unit(self, group: int, count: int) -> int:
        """The tightest started unit that holds `count`, else new units if the count needs any."""
        started = [(free.bit_count(), unit) for unit, free in self._slots[group].items() if free]
        fitting = [entry for entry in started if entry[0] >= count]
        if fitting:
            return min(fitting)[1]
        missing = self._new_units(group, count)
        if missing:
            return self._start_units(group, missing)
        return max(started, key=lambda entry: (entry[0], -entry[1]))[1]

    def _start_units(self, group: int, count: int) -> int:
        per_unit = self.plan.blocks_per_unit[group]
        units = self._take_units(count, lowest=False)
        for unit in units:
            self._slots[group][unit] = (1 << per_unit) - 1
        self._num_free_slots[group] += per_unit * len(units)
        return units[0]

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

    def _give_unit(self, unit: int) -> None:
        assert not self._free_units >> unit & 1, f"unit {unit} is freed twice"
        self._free_units |= 1 << unit
        self._num_free_units += 1

    def _free_slot(self, group: int, unit: int, slot: int) -> None:
        free = self._slots[group][unit]
        assert not free >> slot & 1, f"group {group}: block of unit {unit} is freed twice"
        free |= 1 << slot
        self._num_free_slots[group] += 1
        self._slots[group][unit] = free
        per_unit = self.plan.blocks_per_unit[group]
        if free.bit_count() == per_unit:
            del self._slots[group][unit]
            self._num_free_slots[group] -= per_unit
            self._give_unit(unit)


def _trailing_ones(bits: int) -> int:
    return (~bits & (bits + 1)).bit_length() - 1
