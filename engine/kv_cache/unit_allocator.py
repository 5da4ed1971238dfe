"""Owner of units: which are free, which blocks or states the others hold, and what is in use.

Two levels, as in Jenga (SOSP'25), ids only. A free unit can become one state or a set of small
blocks of one group, at run time, in both directions. States come from the high end and attention
units from the low end, so states of concurrent requests tend to be neighbours (the worker then
updates them without copies), and so do one request's blocks (they then move as one span). The
states of all Mamba groups count under the first of them.
"""

from collections.abc import Iterable, Sequence

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.radix_tree import Units

# Per group: how many new blocks, and the request's last block, after which they are to lie.
NewBlocks = dict[int, tuple[int, int | None]]
Allocated = tuple[list[int], Units]  # blocks, and how many of them lie in each unit


class GroupSlots:
    """Free slots in the units that one group has started; full units are not listed.

    Bit s of `free_bits[unit]` says that slot s of the unit is free. `_units_with[n]`: the units
    with n free slots, so that the tightest fit is found at once; never empty.
    """

    def __init__(self, per_unit: int) -> None:
        self.num_free = 0
        self.free_bits: dict[int, int] = {}
        self._per_unit = per_unit
        self._units_with: dict[int, dict[int, None]] = {}

    def start(self, unit: int, count: int) -> list[int]:
        """Takes in a free unit, and gives up to `count` of its blocks at once."""
        count = min(count, self._per_unit)
        self.num_free += self._per_unit - count
        self._set(unit, (1 << self._per_unit) - (1 << count))
        return list(range(unit * self._per_unit, unit * self._per_unit + count))

    def fill(self, unit: int, count: int, *, start: int = 0) -> list[int]:
        """Up to `count` consecutive slots of `unit`, as blocks, from its first free one.

        With `start`, from there or not at all.
        """
        # Bits of one unit, lowest slot right; `fill(unit, 3)`:
        #
        #   free    0 1 1 0 1 1 0 0      first = 2, taken = 2 (slot 4 is not free)
        #   after   0 1 1 0 0 0 0 0
        free = self.free_bits.get(unit, 0) >> start << start
        if not free or (start and not free >> start & 1):
            return []
        first = (free & -free).bit_length() - 1
        ones = free >> first  # the lowest zero of `ones` ends the consecutive free slots
        taken = min((~ones & (ones + 1)).bit_length() - 1, count)
        self._set(unit, self.free_bits[unit] & ~(((1 << taken) - 1) << first))
        self.num_free -= taken
        base = unit * self._per_unit + first
        return list(range(base, base + taken))

    def tightest(self, count: int) -> int | None:
        """The unit with the fewest free slots, but at least `count`."""
        enough = [num_free for num_free in self._units_with if num_free >= count]
        return next(iter(self._units_with[min(enough)])) if enough else None

    def emptiest(self) -> int:
        """The unit with the most free slots; call only while there is one."""
        return next(iter(self._units_with[max(self._units_with)]))

    def free(self, blocks: Sequence[int]) -> Sequence[int]:
        """Marks blocks free; returns the units that have lost their last one, and forgets them."""
        if self._per_unit == 1:
            return blocks
        empty = []
        for unit, slot, length in _spans(blocks, self._per_unit):
            bits, free = ((1 << length) - 1) << slot, self.free_bits.get(unit, 0)
            assert not free & bits, f"a block of unit {unit} is freed twice"
            self.num_free += length
            free |= bits
            if free.bit_count() == self._per_unit:
                empty.append(unit)
                self.num_free -= self._per_unit
                free = 0
            self._set(unit, free)
        return empty

    def _set(self, unit: int, bits: int) -> None:
        if before := self.free_bits.pop(unit, 0):
            units = self._units_with[before.bit_count()]
            del units[unit]
            if not units:
                del self._units_with[before.bit_count()]
        if bits:
            self.free_bits[unit] = bits
            self._units_with.setdefault(bits.bit_count(), {})[unit] = None


class UnitAllocator:
    """Allocates states and blocks; all-or-nothing is the caller's job through `can_allocate`.

    Bit u of `free_units`, a Python integer, says that unit u is free. `slots[g]`: of group g; a
    state fills its unit, so those of Mamba groups are empty. `used[g]`: how many blocks of each
    unit are in use, `num_used[g]`: their sum.
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self.num_free_units = plan.num_units
        self.free_units = (1 << plan.num_units) - 1
        self.slots = tuple(map(GroupSlots, plan.blocks_per_unit))
        self.num_used = [0] * len(plan.groups)
        self.used: tuple[Units, ...] = tuple({} for _ in plan.groups)
        self._per_unit = plan.blocks_per_unit
        self._state_groups = plan.state_groups

    @property
    def num_used_units(self) -> int:
        """Units of which something is in use."""
        return sum(map(len, self.used))

    def units_of(self, group: int, blocks: Sequence[int]) -> Units:
        """The number of these blocks in each unit."""
        units: Units = {}
        for unit, _, length in _spans(blocks, self._per_unit[group]):
            units[unit] = units.get(unit, 0) + length
        return units

    def can_allocate(self, new: NewBlocks) -> bool:
        """True if all these blocks fit at once, without eviction."""
        needed = 0
        for group, (count, _) in new.items():
            needed += self._num_new_units(group, count)
        return needed <= self.num_free_units

    def num_more_units(self, group: int, units: Iterable[int], count: int) -> int:
        """The number of further used units once `count` more blocks, idle or new, are in use.

        `units`: those of the idle ones.
        """
        # Idle blocks that come into use bring their units with them; what is free in all used
        # units then takes new blocks, and only the rest needs further units.
        used, per_unit = self.used[group], self._per_unit[group]
        fresh = len(set(units).difference(used)) if units else 0
        room = (len(used) + fresh) * per_unit - self.num_used[group]
        return fresh + max(0, -((room - count) // per_unit))

    def allocate(self, group: int, count: int, after: int | None) -> Allocated:
        """`count` blocks or states of `group`, neighbours where possible, in use.

        `after` is the request's last block: its right neighbour is taken first. Call only when
        `can_allocate` said yes.
        """
        if group in self._state_groups:
            blocks = self._take_states(count)
            units = dict.fromkeys(blocks, 1)
        else:
            unit, blocks, units = None, [], {}
            if after is not None:
                unit, slot = divmod(after, self._per_unit[group])
                blocks = self.slots[group].fill(unit, count, start=slot + 1)
                if blocks:
                    units[unit] = len(blocks)
            while (missing := count - len(blocks)) > 0:
                unit, more = self._fill(group, missing, unit)
                units[unit] = units.get(unit, 0) + len(more)
                blocks += more
        self.use(group, units)
        return blocks, units

    def free(self, group: int, blocks: Sequence[int]) -> None:
        """Gives idle blocks or states back; a unit without any is free for any use again."""
        units = self.slots[group].free(blocks)
        for unit in units:
            assert not self.free_units >> unit & 1, f"unit {unit} is freed twice"
            self.free_units |= 1 << unit
        self.num_free_units += len(units)

    def use(self, group: int, units: Units) -> None:
        """New or idle blocks come into use."""
        used = self.used[group]
        self.num_used[group] += sum(units.values())
        for unit, count in units.items():
            used[unit] = used.get(unit, 0) + count

    def unuse(self, group: int, units: Units) -> list[int]:
        """Blocks become idle; returns the units of which nothing is in use any longer."""
        used, idle = self.used[group], []
        self.num_used[group] -= sum(units.values())
        for unit, count in units.items():
            left = used[unit] - count
            if left:
                used[unit] = left
            else:
                del used[unit]
                idle.append(unit)
        return idle

    def _num_new_units(self, group: int, count: int) -> int:
        missing = count - self.slots[group].num_free
        return -(-missing // self._per_unit[group]) if missing > 0 else 0

    def _fill(self, group: int, count: int, last: int | None) -> tuple[int, list[int]]:
        """A unit and up to `count` blocks of it, where the request's last block lies in `last`.

        The tightest started unit that holds them all, else a new unit if the count needs any: the
        one after `last` if it is free, else the first of so many adjacent free ones.
        """
        slots = self.slots[group]
        unit = slots.tightest(count)
        if unit is None and (num_units := self._num_new_units(group, count)):
            unit = None if last is None else last + 1
            if unit is None or not self.free_units >> unit & 1:
                # Bit u of `starts`: so many adjacent units from u on are free. Without such a run
                # any free unit will do.
                starts = self.free_units
                for shift in range(1, num_units):
                    starts &= self.free_units >> shift
                starts = starts or self.free_units
                unit = (starts & -starts).bit_length() - 1
            self.free_units &= ~(1 << unit)
            self.num_free_units -= 1
            return unit, slots.start(unit, count)
        unit = slots.emptiest() if unit is None else unit
        return unit, slots.fill(unit, count)

    def _take_states(self, count: int) -> list[int]:
        """The highest free units."""
        states, free = [], self.free_units
        for _ in range(count):
            unit = free.bit_length() - 1
            states.append(unit)
            free ^= 1 << unit
        self.free_units = free
        self.num_free_units -= count
        return states


def _spans(blocks: Sequence[int], per_unit: int) -> list[tuple[int, int, int]]:
    """(unit, first slot, count) of blocks that lie together in one unit."""
    spans, start = [], 0
    while start < len(blocks):
        first = blocks[start]
        unit, slot = divmod(first, per_unit)
        near = blocks[start : start + per_unit - slot]  # no more can lie together from here on
        count = len(near)
        if near[-1] - first != count - 1 or near != list(range(first, first + count)):
            count = 1
            while near[count] == first + count:
                count += 1
        spans.append((unit, slot, count))
        start += count
    return spans
