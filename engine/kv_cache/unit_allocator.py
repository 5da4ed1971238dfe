"""Owner of units: which are free, which blocks or states the others hold, and what is in use.

Two levels, as in Jenga (SOSP'25), ids only. A free unit can become one state or a set of small
blocks of one group, at run time, in both directions. States come from the high end and attention
units from the low end, so states of concurrent requests tend to be neighbours (the worker then
updates them without copies), and so do one request's blocks (they then move as one span). The
states of all Mamba groups count under the first of them.
"""

from collections.abc import Sequence

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.radix_tree import Units

# Per group: how many new blocks, and the request's last block, after which they are to lie.
NewBlocks = dict[int, tuple[int, int | None]]


class GroupSlots:
    """Free slots in the units that one attention group has started; full units are not listed.

    Bit s of `free_bits[unit]` says that slot s of the unit is free. `_units_with[n]`: the units
    with n free slots, so that the tightest fit is found at once.
    """

    def __init__(self, per_unit: int) -> None:
        self.num_free = 0
        self.free_bits: dict[int, int] = {}
        self._per_unit = per_unit
        self._units_with: list[dict[int, None]] = [{} for _ in range(per_unit + 1)]

    def start(self, unit: int, count: int) -> list[int]:
        """Takes in a unit, and gives up to `count` of its blocks at once."""
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
        return next((unit for units in self._units_with[count:] for unit in units), None)

    def emptiest(self) -> int:
        """The unit with the most free slots; call only while there is one."""
        return next(unit for units in reversed(self._units_with) for unit in units)

    def free(self, blocks: Sequence[int]) -> list[int]:
        """Marks blocks free; returns the units that have lost their last one, and forgets them."""
        freed: dict[int, int] = {}
        for unit, slot, count in _spans(blocks, self._per_unit):
            freed[unit] = freed.get(unit, 0) | ((1 << count) - 1) << slot
        empty = []
        for unit, bits in freed.items():
            free = self.free_bits.get(unit, 0)
            assert not free & bits, f"a block of unit {unit} is freed twice"
            self.num_free += bits.bit_count()
            free |= bits
            if free.bit_count() == self._per_unit:
                empty.append(unit)
                self.num_free -= self._per_unit
                free = 0
            self._set(unit, free)
        return empty

    def _set(self, unit: int, bits: int) -> None:
        before = self.free_bits.pop(unit, 0)
        if before:
            del self._units_with[before.bit_count()][unit]
        if bits:
            self.free_bits[unit] = bits
            self._units_with[bits.bit_count()][unit] = None


class UnitAllocator:
    """Allocates states and blocks; all-or-nothing is the caller's job through `can_allocate`.

    Bit u of `free_units`, a Python integer, says that unit u is free. `slots[g]`: attention groups
    only. `used[g]`: how many blocks of each unit are in use, `num_used[g]`: their sum.
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self.num_free_units = plan.num_units
        self.free_units = (1 << plan.num_units) - 1
        self.slots = {
            group: GroupSlots(per_unit)
            for group, per_unit in enumerate(plan.blocks_per_unit)
            if group not in plan.state_groups
        }
        self.num_used = [0] * len(plan.groups)
        self.used: tuple[Units, ...] = tuple({} for _ in plan.groups)

    @property
    def num_used_units(self) -> int:
        """Units of which something is in use."""
        return sum(map(len, self.used))

    def units_of(self, group: int, blocks: Sequence[int]) -> Units:
        """The number of these blocks in each unit."""
        per_unit = self.plan.blocks_per_unit[group]
        if _are_consecutive(blocks):
            return {unit: count for unit, _, count in _spans(blocks, per_unit)}
        units: Units = {}
        for block in blocks:
            unit = block // per_unit
            units[unit] = units.get(unit, 0) + 1
        return units

    def num_missing_slots(self, group: int, count: int) -> int:
        """The number of `count` blocks that do not fit the units that a group has started."""
        return count - self.slots[group].num_free if group in self.slots else 0

    def can_allocate(self, new: NewBlocks) -> bool:
        """True if all these blocks fit at once, without eviction."""
        needed = sum([self._num_new_units(group, count) for group, (count, _) in new.items()])
        return needed <= self.num_free_units

    def num_more_units(self, group: int, *, units: set[int], more: int, new: int) -> int:
        """The number of further used units once `more` idle and `new` blocks are in use."""
        # Idle blocks that come into use bring their units with them; what is free in all used
        # units then takes new blocks, and only the rest needs further units.
        fresh = len(units - self.used[group].keys()) if units else 0
        per_unit = self.plan.blocks_per_unit[group]
        room = (len(self.used[group]) + fresh) * per_unit - self.num_used[group] - more
        return fresh + max(0, -((room - new) // per_unit))

    def allocate(self, group: int, count: int, after: int | None) -> list[int]:
        """`count` blocks or states of `group`, neighbours where possible, in use.

        `after` is the request's last block: its right neighbour is taken first. Call only when
        `can_allocate` said yes.
        """
        used = self.used[group]
        self.num_used[group] += count
        if group not in self.slots:
            states = self._take_states(count)
            used.update(dict.fromkeys(states, 1))
            return states
        unit, slots = None, self.slots[group]
        blocks: list[int] = []
        if after is not None:
            unit, slot = divmod(after, self.plan.blocks_per_unit[group])
            blocks = slots.fill(unit, count, start=slot + 1)
            if blocks:
                used[unit] = used.get(unit, 0) + len(blocks)
        while (missing := count - len(blocks)) > 0:
            unit, more = self._fill(group, missing, unit)
            used[unit] = used.get(unit, 0) + len(more)
            blocks += more
        return blocks

    def free(self, group: int, blocks: Sequence[int]) -> None:
        """Gives idle blocks or states back; a unit without any is free for any use again."""
        units = self.slots[group].free(blocks) if group in self.slots else list(blocks)
        for unit in units:
            assert not self.free_units >> unit & 1, f"unit {unit} is freed twice"
            self.free_units |= 1 << unit
        self.num_free_units += len(units)

    def is_used(self, unit: int) -> bool:
        """True if anything in a unit is in use."""
        return any(unit in used for used in self.used)

    def use(self, group: int, units: Units) -> None:
        """Idle blocks come into use."""
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
        if group not in self.slots:
            return count
        missing = count - self.slots[group].num_free
        return -(-missing // self.plan.blocks_per_unit[group]) if missing > 0 else 0

    def _fill(self, group: int, count: int, last: int | None) -> tuple[int, list[int]]:
        """A unit and up to `count` blocks of it, where the request's last block lies in `last`.

        The tightest started unit that holds them all, else a new unit if the count needs any.
        """
        slots = self.slots[group]
        unit = slots.tightest(count)
        if unit is not None:
            return unit, slots.fill(unit, count)
        num_units = self._num_new_units(group, count)
        if num_units:
            unit = self._take_unit(num_units, last)
            return unit, slots.start(unit, count)
        unit = slots.emptiest()
        return unit, slots.fill(unit, count)

    def _take_unit(self, num_adjacent: int, last: int | None) -> int:
        """The unit after `last` if it is free, else the first of so many adjacent free ones."""
        if last is not None and self.free_units >> last + 1 & 1:
            first = last + 1
        else:
            # Bit u of `starts`: so many adjacent units from u on are free. Without such a run any
            # free unit will do.
            starts = self.free_units
            for shift in range(1, num_adjacent):
                starts &= self.free_units >> shift
            starts = starts or self.free_units
            first = (starts & -starts).bit_length() - 1
        self.free_units &= ~(1 << first)
        self.num_free_units -= 1
        return first

    def _take_states(self, count: int) -> list[int]:
        """The highest free units."""
        states = []
        for _ in range(count):
            states.append(self.free_units.bit_length() - 1)
            self.free_units ^= 1 << states[-1]
        self.num_free_units -= count
        return states


def _are_consecutive(blocks: Sequence[int]) -> bool:
    if not blocks or blocks[-1] - blocks[0] != len(blocks) - 1:
        return False
    return blocks == list(range(blocks[0], blocks[-1] + 1))


def _spans(blocks: Sequence[int], per_unit: int) -> list[tuple[int, int, int]]:
    """(unit, first slot, count) of blocks that lie together; consecutive blocks in few spans."""
    if not _are_consecutive(blocks):
        return [(*divmod(block, per_unit), 1) for block in blocks]
    spans, first, total = [], blocks[0], len(blocks)
    while total:
        unit, slot = divmod(first, per_unit)
        count = min(total, per_unit - slot)
        spans.append((unit, slot, count))
        first += count
        total -= count
    return spans
