"""Pieces of prefixes, and the messages about them between the two sides of the OffloadConnector."""

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


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""


# --- from the scheduler side ---------------------------------------------------------------------


class HostCopy(_Message, frozen=True):
    """Copy what this step evicts to byte `offset` of the host tier, before the step writes."""

    item: Item
    source: Place
    offset: int


class FileWrite(_Message, frozen=True):
    """Write items to one new file: from the arena, whose blocks are pinned, or the host tier.

    `save_id`: report it in `ConnectorOutput.saved` once the arena has been read; None if nothing is
    read there. `sources[i]`: blocks in the arena, or a byte offset in the host tier, of `items[i]`.
    """

    write_id: int
    items: tuple[Item, ...]
    sources: tuple[Place | int, ...]
    save_id: str | None = None


class FileRange(_Message, frozen=True, tag=True):
    """An item's bytes in a file of the disk tier; `xxh3`: their 64-bit digest."""

    name: str
    offset: int
    nbytes: int
    xxh3: int


class LoadPart(_Message, frozen=True):
    """Fill an item's place in the arena.

    `source`: a byte offset in the host tier, a file, or another place in the arena, which is copied
    from before the step writes anything. None: its last copy was evicted in this very step.
    """

    item: Item
    target: Place
    source: int | FileRange | Place | None


class TierLoad(_Message, frozen=True):
    """One request's load; parts of one group in token order. `load_id` is never used again."""

    load_id: int
    request_id: str
    parts: tuple[LoadPart, ...]


class Orders(_Message, frozen=True):
    """The message of one step."""

    copies: tuple[HostCopy, ...] = ()
    writes: tuple[FileWrite, ...] = ()
    loads: tuple[TierLoad, ...] = ()


# --- from the worker side ------------------------------------------------------------------------


class FileItems(_Message, frozen=True):
    """A file that is there now, this node's or another's: its items and where they lie in it."""

    name: str
    items: tuple[Item, ...]
    ranges: tuple[FileRange, ...]


class WriteDone(_Message, frozen=True):
    """The end of a `FileWrite`; `file` is None if it failed, which the worker side has logged."""

    write_id: int
    file: FileItems | None


class Report(_Message, frozen=True):
    """Events since the last step.

    `written`: the ends of writes. `found`: new files of others, and at start all. `gone`: files
    that are there no longer. `bad`: items that turned out to be missing or damaged, by file.
    `ended`: ids of loads whose threads touch neither tier nor arena any more; a load that ran out
    of time has failed long before. `is_writable`: False while the disk cannot be written to.
    """

    written: tuple[WriteDone, ...] = ()
    found: tuple[FileItems, ...] = ()
    gone: tuple[str, ...] = ()
    bad: tuple[tuple[str, Item], ...] = ()
    ended: tuple[int, ...] = ()
    is_writable: bool = True
