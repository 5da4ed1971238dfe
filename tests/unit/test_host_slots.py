"""Slots of the host tier: what a load reads is not given to another item."""

from connector.offload.host_slots import HostSlots
from connector.offload.items import Key


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
