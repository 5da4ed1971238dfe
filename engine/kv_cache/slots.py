"""Free block slots in the units that one attention group has started. Knows no other group."""

from collections.abc import Sequence


def units_of(blocks: Sequence[int], per_unit: int) -> dict[int, int]:
    """How many of these blocks lie in each unit."""
    if _are_consecutive(blocks):
        return {unit: count for unit, _, count in _pieces(blocks[0], len(blocks), per_unit)}
    places = [block // per_unit for block in blocks]
    return {unit: places.count(unit) for unit in dict.fromkeys(places)}


def _are_consecutive(blocks: Sequence[int]) -> bool:
    if not blocks or blocks[-1] - blocks[0] != len(blocks) - 1:
        return False
    return blocks == list(range(blocks[0], blocks[-1] + 1))


def _pieces(first: int, total: int, per_unit: int) -> list[tuple[int, int, int]]:
    """(unit, first slot, count) of consecutive blocks."""
    pieces = []
    while total:
        unit, slot = divmod(first, per_unit)
        count = min(total, per_unit - slot)
        pieces.append((unit, slot, count))
        first += count
        total -= count
    return pieces


class GroupSlots:
    """Bit s of a unit's number says that its slot s is free; full units are not listed.

    `_units_with[n]`: the units with n free slots, so that the tightest fit is found at once.
    """

    def __init__(self, per_unit: int) -> None:
        self.num_free = 0
        self.free_bits: dict[int, int] = {}
        self._per_unit = per_unit
        self._units_with: list[dict[int, None]] = [{} for _ in range(per_unit + 1)]

    def start(self, unit: int, count: int) -> list[int]:
        """Takes in a unit, and gives its first `count` blocks at once."""
        count = min(count, self._per_unit)
        self.num_free += self._per_unit - count
        self._set(unit, (1 << self._per_unit) - (1 << count))
        return list(range(unit * self._per_unit, unit * self._per_unit + count))

    def fill(self, unit: int, count: int, *, start: int = 0) -> list[int]:
        """Up to `count` consecutive slots of `unit`, as blocks, from its first free one.

        With `start`, from there or not at all.
        """
        free = self.free_bits.get(unit, 0) >> start << start
        if not free or (start and not free >> start & 1):
            return []
        first = (free & -free).bit_length() - 1
        run = free >> first
        taken = min((~run & (run + 1)).bit_length() - 1, count)
        self._set(unit, self.free_bits[unit] & ~(((1 << taken) - 1) << first))
        self.num_free -= taken
        base = unit * self._per_unit + first
        return list(range(base, base + taken))

    def tightest(self, count: int) -> int | None:
        """The unit with the fewest free slots, but at least `count`."""
        for units in self._units_with[count:]:
            for unit in units:
                return unit
        return None

    def emptiest(self) -> int:
        """The unit with the most free slots; call only while there is one."""
        return next(unit for units in reversed(self._units_with) for unit in units)

    def free(self, blocks: Sequence[int]) -> list[int]:
        """Marks blocks free; returns the units that have lost their last one, and forgets them."""
        freed: dict[int, int] = {}
        if _are_consecutive(blocks):
            pieces = _pieces(blocks[0], len(blocks), self._per_unit)
        else:
            pieces = [(*divmod(block, self._per_unit), 1) for block in blocks]
        for unit, slot, count in pieces:
            freed[unit] = freed.get(unit, 0) | ((1 << count) - 1) << slot
        empty = []
        for unit, bits in freed.items():
            free = self.free_bits.get(unit, 0)
            assert not free & bits, f"a block of unit {unit} is freed twice"
            self.num_free += bits.bit_count()
            self._set(unit, free | bits)
            if (free | bits).bit_count() == self._per_unit:
                empty.append(unit)
                self.num_free -= self._per_unit
                self._set(unit, 0)
        return empty

    def _set(self, unit: int, bits: int) -> None:
        before = self.free_bits.pop(unit, 0)
        if before:
            del self._units_with[before.bit_count()][unit]
        if bits:
            self.free_bits[unit] = bits
            self._units_with[bits.bit_count()][unit] = None
