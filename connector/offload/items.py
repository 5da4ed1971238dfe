"""What a tier keeps: pieces of prefixes, each under a name that says its content. Pure."""

from typing import NamedTuple

import msgspec

STATES = -1
"""The `group` of an item that holds the states of all Mamba groups."""


class Key(NamedTuple):
    """The name of an item on every node of one geometry: equal names, equal bytes."""

    group: int
    digest: bytes


class Item(msgspec.Struct, frozen=True, array_like=True):
    """K/V of tokens [`start`, `end`) of one attention group, or all states after `end` tokens.

    `start`: of the item's chunk; for states, `end`. `digest`: of the whole prefix of `end` tokens
    (32 bytes). `boundaries`: those of the prefixes up to each hash boundary from `start` to before
    `end`; for states the last one before `end` alone.
    """

    group: int
    start: int
    end: int
    digest: bytes
    boundaries: tuple[bytes, ...]

    @property
    def key(self) -> Key:
        """Its name."""
        return Key(self.group, self.digest)

    @property
    def parent(self) -> bytes:
        """Digest at the last hash boundary before `end`; ends between two are found by it."""
        return self.boundaries[-1]


class Place(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where an item lies in the arena.

    `blocks`: one block, or one state of each Mamba group. `first`: the item's first token, counted
    from the start of the block; 0 for states.
    """

    blocks: tuple[int, ...]
    first: int = 0
