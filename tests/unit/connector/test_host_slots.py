"""The slots of the host tier against a plain record of who has which bytes."""

from collections import Counter
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from connector.offload.host_slots import ALIGNMENT, HostSlots
from connector.offload.messages import STATES, Key

UNIT = 4096
SIZES = {0: 4096, 1: 1000, 2: 64, STATES: 1500}
NOBODY = 10_000
CHOICE = st.integers(0, NOBODY)


class SlotsMachine(RuleBasedStateMachine):
    """Items come, go, are read by loads and leave for the disk, in any order."""

    @initialize(num_units=st.integers(1, 5))
    def begin(self, num_units: int) -> None:
        self.slots = HostSlots(num_units, UNIT, SIZES)
        self.keys: dict[int, Key] = {}
        self.readers: list[int] = []  # offsets, one for each load that reads there
        self.unread: set[int] = set()  # freed while their unit was read
        self.leaving: set[int] = set()
        self.order: list[int] = []  # units, the last one added to is last
        self.group: dict[int, int] = {}
        self.num_made = 0

    @rule(group=st.sampled_from(sorted(SIZES)))
    def insert(self, group: int) -> None:
        self.num_made += 1
        key = Key(group, self.num_made.to_bytes(32))
        room = self.room_of(group)
        offset = self.slots.insert(key)
        assert (offset is not None) == bool(room)
        if offset is None:
            return
        assert offset in room, "the bytes are somebody's, are being read, or leave"
        unit = offset // UNIT
        self.keys[offset], self.group[unit] = key, group
        self.order = [*(one for one in self.order if one != unit), unit]

    def room_of(self, group: int) -> set[int]:
        """By definition: free bytes of the group's own units; only if there are none, of others."""
        staying = [unit for unit in self.order if unit not in self.leaving]
        own = [unit for unit in staying if self.group[unit] == group]
        taken = self.keys.keys() | self.unread
        room = {offset for unit in own for offset in self.offsets(unit, group)} - taken
        unused = set(range(self.slots.num_units)) - set(self.order)
        return room or {offset for unit in unused for offset in self.offsets(unit, group)}

    def offsets(self, unit: int, group: int) -> list[int]:
        size = ceil(SIZES[group] / ALIGNMENT) * ALIGNMENT
        return [unit * UNIT + number * size for number in range(UNIT // size)]

    @precondition(lambda self: self.keys)
    @rule(choice=CHOICE)
    def free(self, choice: int) -> None:
        offset = self.chosen(sorted(self.keys), choice)
        del self.keys[offset]
        if self.is_read(offset // UNIT):
            self.unread.add(offset)
        self.slots.free(offset)
        self.forget_unused()

    @precondition(lambda self: self.keys)
    @rule(choice=CHOICE)
    def pin(self, choice: int) -> None:
        self.readers.append(self.chosen(sorted(self.keys), choice))
        self.slots.pin(self.readers[-1])

    @precondition(lambda self: self.readers)
    @rule(choice=CHOICE)
    def unpin(self, choice: int) -> None:
        offset = self.readers.pop(choice % len(self.readers))
        self.slots.unpin(offset)
        unit = offset // UNIT
        if not self.is_read(unit):
            self.unread = {one for one in self.unread if one // UNIT != unit}
        self.forget_unused()

    @precondition(lambda self: self.oldest() is not None)
    @rule()
    def leave(self) -> None:
        unit = self.oldest()
        assert unit is not None
        self.slots.leave(unit)
        self.leaving.add(unit)

    @precondition(lambda self: self.leaving)
    @rule(choice=CHOICE, is_written=st.booleans())
    def end_leaving(self, choice: int, is_written: bool) -> None:
        unit = self.chosen(sorted(self.leaving), choice)
        self.leaving.remove(unit)
        assert self.slots.is_read(unit) == self.is_read(unit)
        if is_written and not self.is_read(unit):
            self.drop(unit)
            return
        self.slots.stay(unit)
        self.forget_unused()

    @precondition(lambda self: self.oldest() is not None)
    @rule()
    def drop_oldest(self) -> None:
        unit = self.oldest()
        assert unit is not None
        self.drop(unit)

    def drop(self, unit: int) -> None:
        mine = {offset: key for offset, key in self.keys.items() if offset // UNIT == unit}
        assert self.slots.drop(unit) == mine
        self.keys = {offset: key for offset, key in self.keys.items() if offset not in mine}
        self.forget_unused()

    def forget_unused(self) -> None:
        used = {offset // UNIT for offset in (*self.keys, *self.readers)} | self.leaving
        self.order = [unit for unit in self.order if unit in used]

    def is_read(self, unit: int) -> bool:
        return any(offset // UNIT == unit for offset in self.readers)

    def oldest(self) -> int | None:
        idle = (u for u in self.order if u not in self.leaving and not self.is_read(u))
        return next(idle, None)

    @staticmethod
    def chosen(all_of_them: list[int], choice: int) -> int:
        return all_of_them[choice % len(all_of_them)]

    @invariant()
    def units_are_counted(self) -> None:
        assert self.slots.num_items == len(self.keys)
        assert self.slots.num_free_units == self.slots.num_units - len(self.order)
        least, unit = self.slots.least_recent(), self.oldest()
        assert (None if least is None else least[0]) == unit
        if least is not None:
            assert least[1] == {at: key for at, key in self.keys.items() if at // UNIT == unit}

    @invariant()
    def nobody_shares_a_byte(self) -> None:
        spans = sorted((offset, offset + SIZES[key.group]) for offset, key in self.keys.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start // UNIT == (end - 1) // UNIT for start, end in spans)
        groups = Counter({(start // UNIT, self.keys[start].group) for start, _ in spans})
        assert len(groups) == len({unit for unit, _ in groups}), "groups share a unit"


def test_a_slot_that_is_freed_while_it_is_read_is_reused_only_afterwards() -> None:
    """Another connector may bring an item to the arena while a load still reads it here."""
    slots = HostSlots(1, 256, {0: 64})
    first, *others = [slots.insert(Key(0, bytes([number]))) for number in range(4)]
    assert first is not None and None not in others
    slots.pin(first)
    slots.free(first)
    assert slots.insert(Key(0, b"new")) is None
    slots.leave(0)
    slots.stay(0)  # its file could not be written
    assert slots.insert(Key(0, b"new")) is None
    slots.unpin(first)
    assert slots.insert(Key(0, b"new")) == first


EVERYDAY = settings(max_examples=150, stateful_step_count=40)
MANY = settings(max_examples=1000, stateful_step_count=60, derandomize=False)


def test_slots_are_those_of_the_model() -> None:
    run_machine(SlotsMachine, settings=EVERYDAY)


@pytest.mark.long
def test_slots_are_those_of_the_model_in_other_runs() -> None:
    run_machine(SlotsMachine, settings=MANY)
