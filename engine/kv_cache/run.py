"""Runs: blocks of one group, in token order, that are shared, kept and let go together.

Findable blocks of full attention form a tree of runs, as in a radix tree: a prompt that leaves a
cached one in the middle of a run splits it there. A use of a run is a use of all runs before it.
So a long shared prefix costs a few steps, not one per block.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.types import TokenId

Rank = tuple[float, int]
Units = dict[int, int]  # how many blocks lie in each unit


class PartialKey(NamedTuple):
    """A prefix by its last hash boundary's digest and the tokens behind that boundary."""

    boundary: bytes
    tail: tuple[TokenId, ...] = ()


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of an attention group, or the states of one checkpoint (one unit per Mamba group).

    `start`: place of its first block in a block table. `digests[i]`: the prefix that whole block i
    ends; `partial_keys`: prefixes that end inside a run's only block, or where a state stands.
    In a tree, `children` are the runs behind its end, by their first digest, and `leaves` are
    partly filled blocks there. `refs`: uses of it, and runs in use right behind it.
    `worth`: tokens saved per byte; `rank`: its place in the order of eviction while idle.
    """

    group: int
    start: int
    blocks: list[int]
    units: Units = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)
    partial_keys: list[PartialKey] = field(default_factory=list)
    parent: "Run | None" = None
    children: dict[bytes, "Run"] = field(default_factory=dict)
    leaves: set["Run"] = field(default_factory=set)
    refs: int = 1
    worth: float = 1.0
    rank: Rank = (0.0, 0)

    @property
    def end(self) -> int:
        """The place behind its last block."""
        return self.start + len(self.blocks)

    @property
    def is_findable(self) -> bool:
        """Whether any prefix leads here."""
        return bool(self.digests or self.partial_keys)

    @property
    def following(self) -> list["Run"]:
        """All runs right behind its end."""
        return [*self.children.values(), *self.leaves]

    @property
    def can_grow(self) -> bool:
        """Whether its only user may append to it instead of starting a run of its own."""
        return self.refs == 1 and not (self.children or self.leaves or self.partial_keys)

    def ends_for(self, child: "Run") -> bool:
        """Whether its end matters only to `child` and to one user, so that it may be moved."""
        is_alone = len(self.children) == 1 and not (self.leaves or self.partial_keys)
        return is_alone and child.parent is self and self.refs == 1 + (child.refs > 0)

    def path(self, end: int) -> list[int]:
        """The blocks of all runs from the root to this one, up to place `end`."""
        parts: list[list[int]] = []
        run: Run | None = self
        while run is not None:
            parts.append(run.blocks[: end - run.start])
            end, run = run.start, run.parent
        blocks: list[int] = []
        for part in reversed(parts):
            blocks += part
        return blocks

    def descend(self, digests: Sequence[bytes]) -> tuple["Run", int]:
        """(deepest run, number of `digests` found) on the way down from this run's end.

        Each digest stands for all tokens up to it, so equal ones have equal ones before them.
        """
        run, found = self, 0
        while found < len(digests) and (child := run.children.get(digests[found])) is not None:
            run, known = child, digests[found : found + len(child.digests)]
            if known[-1] == child.digests[len(known) - 1]:
                found += len(known)
                continue
            pairs = range(len(known))
            return run, found + bisect_left(pairs, True, key=lambda i: known[i] != child.digests[i])
        return run, found
