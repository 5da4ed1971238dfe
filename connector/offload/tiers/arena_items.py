"""Copies items between the arena and dense bytes: the host tier, or a buffer for a file.

    arena, one block    | layer: K heads, V heads, each [block_size tokens, head_dim] | layer ...
    dense, one chunk    | the same, of its tokens only |

A whole block is one span on both sides. Copies are torch's: they release the GIL.

On a device they run on the arena's side stream, and are done when a call returns, so a step that is
launched after it may write over what was packed, and read what was unpacked.
"""

from collections.abc import Iterable, Sequence
from math import gcd

import torch

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.messages import STATES, Item, Place
from engine.arena import ArenaMemory

WORD = 16
LEAST_ROW = 4096
"""Bytes; shorter rows are copied slower than spans one by one."""
Packed = tuple[Item, Place, int]
"""An item, its place in the arena, and its byte offset in the dense bytes."""


class ArenaItems:
    """The items of one arena."""

    def __init__(self, chunks: ChunkPlan, arena: ArenaMemory) -> None:
        self.chunks = chunks
        self._arena = arena
        plan = chunks.arena
        # By group: tokens and bytes of a whole block, and blocks per unit; needed for every item.
        self._blocks = {
            group: (plan.block_size_of(group), plan.block_bytes(group), plan.blocks_per_unit[group])
            for group in chunks.chunk_tokens
        }

    def pack(self, packed: Iterable[Packed], dense: torch.Tensor) -> None:
        """Copies items from the arena to `dense`, uint8, shape (nbytes,)."""
        self._copy(packed, dense, to_arena=False)

    def unpack(self, packed: Iterable[Packed], dense: torch.Tensor) -> None:
        """Copies items from `dense`, uint8, shape (nbytes,), to the arena."""
        self._copy(packed, dense, to_arena=True)

    def copy_within(self, item: Item, source: Place, target: Place) -> None:
        """Copies an item from one place in the arena to another."""
        dense = torch.empty(self.chunks.nbytes(item), dtype=torch.uint8)
        self.pack([(item, source, 0)], dense)
        self.unpack([(item, target, 0)], dense)

    def _copy(self, packed: Iterable[Packed], dense: torch.Tensor, *, to_arena: bool) -> None:
        # Beside the step that runs on a device. Copies to and from the host end before they return.
        with self._arena.on_side_stream(after_mark=True):
            self._copy_all(packed, dense, to_arena=to_arena)

    def _copy_all(self, packed: Iterable[Packed], dense: torch.Tensor, *, to_arena: bool) -> None:
        # Spans of equal length whose dense bytes follow each other go in one call.
        starts: list[int] = []
        there = nbytes = 0
        for item, place, offset in packed:
            for start, length in self._spans(item, place):
                if length != nbytes or offset != there + nbytes * len(starts):
                    self._copy_spans(starts, nbytes, dense[there:], to_arena=to_arena)
                    starts, there, nbytes = [], offset, length
                starts.append(start)
                offset += length
            if self._is_part(item):
                self._copy_part(item, place, dense[offset:], to_arena=to_arena)
        self._copy_spans(starts, nbytes, dense[there:], to_arena=to_arena)

    def _copy_spans(
        self, starts: Sequence[int], nbytes: int, dense: torch.Tensor, *, to_arena: bool
    ) -> None:
        """`nbytes` from each of `starts` in the arena; they follow each other in `dense`."""
        arena, dense = self._arena.tensor, dense[: nbytes * len(starts)]
        row = gcd(nbytes, *starts)
        if len(starts) < 2 or row < LEAST_ROW or not arena.is_cpu or dense.data_ptr() % WORD:
            for number, start in enumerate(starts):
                content = dense[number * nbytes : (number + 1) * nbytes]
                block = arena[start : start + nbytes]
                _ = block.copy_(content) if to_arena else content.copy_(block)
            return
        # A loop in Python would fight with the engine's thread for the GIL at every span.
        first = torch.tensor(starts) // row
        ids = (first[:, None] + torch.arange(nbytes // row)).view(-1)
        blocks, contents = _in_rows(arena, row), _in_rows(dense, row)
        if to_arena:
            blocks.index_copy_(0, ids, contents)
        else:
            torch.index_select(blocks, 0, ids, out=contents)

    def _copy_part(self, item: Item, place: Place, dense: torch.Tensor, *, to_arena: bool) -> None:
        """Some tokens of a block: of each of its rows a part."""
        plan, num_tokens = self.chunks.arena, item.end - item.start
        num_rows, token = self.chunks.rows(item.group)
        start = plan.block_offset(item.group, place.blocks[0])
        block = self._arena.tensor[start : start + plan.block_bytes(item.group)]
        rows = block.view(num_rows, plan.block_size_of(item.group), token)
        here = rows[:, place.first : place.first + num_tokens]
        other = dense[: num_rows * num_tokens * token].view(num_rows, num_tokens, token)
        _ = here.copy_(other) if to_arena else other.copy_(here)

    def _spans(self, item: Item, place: Place) -> Sequence[tuple[int, int]]:
        """(offset, bytes) in the arena of what lies there as it lies in dense bytes."""
        plan = self.chunks.arena
        if item.group == STATES:
            pairs = zip(plan.state_groups, place.blocks, strict=True)
            return [(plan.block_offset(g, block), plan.block_bytes(g)) for g, block in pairs]
        if self._is_part(item):
            return ()
        _, nbytes, per_unit = self._blocks[item.group]
        unit, slot = divmod(place.blocks[0], per_unit)  # as in `ArenaPlan.block_offset`
        return ((unit * plan.unit_bytes + slot * nbytes, nbytes),)

    def _is_part(self, item: Item) -> bool:
        return item.group != STATES and item.end - item.start < self._blocks[item.group][0]


def _in_rows(content: torch.Tensor, row: int) -> torch.Tensor:
    """Bytes as rows of `row` bytes, of the widest type: torch copies element by element."""
    whole = content[: content.numel() // row * row]
    return whole.view(torch.complex128).view(-1, row // WORD)
