"""The slots of the host tier: memory in equal units, each for items of one group. Ids only; pure.

A unit is cut into slots for whole chunks of one group, or for states; groups share no slot size.
An empty unit may serve any group. Items leave by unit: the one least recently added to goes first.

    unit 0 | chunk | chunk | free  | chunk |     group 0
    unit 1 | states        | states        |     Mamba groups
    unit 2 |            free               |     whoever is next
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from connector.offload.messages import Key

ALIGNMENT = 64
"""Bytes: a cache line, so that copies of neighbours do not share one."""


@dataclass(slots=True)
class _Unit:
    """One unit in use. `readers`: loads from it. `is_leaving`: its items are being written.

    `freed`: slots whose items went while a load may read them; nothing is put there before it ends.
    """

    group: int
    keys: dict[int, Key] = field(default_factory=dict)  # by byte offset
    readers: int = 0
    is_leaving: bool = False
    freed: list[int] = field(default_factory=list)


class HostSlots:
    """Which item is at which byte offset of a host tier of `num_units` units."""

    def __init__(self, num_units: int, unit_bytes: int, slot_bytes: Mapping[int, int]) -> None:
        self.num_units = num_units
        self.unit_bytes = unit_bytes
        self._slot_bytes = {
            group: -(-size // ALIGNMENT) * ALIGNMENT for group, size in slot_bytes.items()
        }
        self._free_units = list(reversed(range(self.num_units)))
        self._units: OrderedDict[int, _Unit] = OrderedDict()  # the last one added to is last
        self._free: dict[int, list[int]] = {group: [] for group in slot_bytes}

    @property
    def num_free_units(self) -> int:
        return len(self._free_units)

    @property
    def num_items(self) -> int:
        """Items in all units; from any thread."""
        return sum(len(unit.keys) for unit in self._units.copy().values())

    def insert(self, key: Key) -> int | None:
        """A slot for an item, as byte offset; None if there is none."""
        free = self._free[key.group]
        if not free:
            if not self._free_units:
                return None
            number = self._free_units.pop()
            self._units[number] = _Unit(key.group)
            # Taken in ascending order: neighbours are copied as one.
            free += reversed(self._slots(number, key.group))
        offset = free.pop()
        number = offset // self.unit_bytes
        self._units[number].keys[offset] = key
        self._units.move_to_end(number)
        return offset

    def free(self, offset: int) -> None:
        """The slot's item is gone; an empty unit is free for any group."""
        number = offset // self.unit_bytes
        unit = self._units[number]
        del unit.keys[offset]
        if unit.readers:
            unit.freed.append(offset)
        elif not unit.is_leaving:
            self._free[unit.group].append(offset)
        self._drop_if_idle(number)

    def pin(self, offset: int) -> None:
        """A load reads this slot: its unit stays."""
        self._units[offset // self.unit_bytes].readers += 1

    def unpin(self, offset: int) -> None:
        number = offset // self.unit_bytes
        unit = self._units[number]
        unit.readers -= 1
        if not unit.readers:
            freed, unit.freed = unit.freed, []
            if not unit.is_leaving:
                self._free[unit.group] += freed
        self._drop_if_idle(number)

    def least_recent(self) -> tuple[int, dict[int, Key]] | None:
        """(unit, its items by offset) that should go next; none that is read or leaving."""
        for number, unit in self._units.items():
            if not unit.readers and not unit.is_leaving:
                return number, unit.keys
        return None

    def leave(self, number: int) -> None:
        """The items of a unit are being written to a file: nothing is added to it."""
        unit = self._units[number]
        unit.is_leaving = True
        self._forget_free(number, unit.group)

    def stay(self, number: int) -> None:
        """The items of a unit could not be written: it is as before."""
        unit = self._units[number]
        unit.is_leaving = False
        used = unit.keys.keys() | unit.freed
        self._free[unit.group] += [s for s in self._slots(number, unit.group) if s not in used]
        self._drop_if_idle(number)

    def drop(self, number: int) -> dict[int, Key]:
        """Frees a unit that no load reads; returns the items that it held, by offset."""
        unit = self._units.pop(number)
        assert not unit.readers, f"unit {number} is being read"
        self._free_units.append(number)
        self._forget_free(number, unit.group)
        return unit.keys

    def is_read(self, number: int) -> bool:
        """True while a load reads from the unit."""
        return self._units[number].readers > 0

    def _slots(self, number: int, group: int) -> range:
        first, size = number * self.unit_bytes, self._slot_bytes[group]
        return range(first, first + self.unit_bytes - size + 1, size)

    def _drop_if_idle(self, number: int) -> None:
        unit = self._units[number]
        if not (unit.keys or unit.readers or unit.is_leaving):
            self.drop(number)

    def _forget_free(self, number: int, group: int) -> None:
        size = self.unit_bytes
        self._free[group] = [slot for slot in self._free[group] if slot // size != number]
