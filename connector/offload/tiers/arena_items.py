"""Copies items between the arena and dense bytes: the host tier, or a buffer for a file.

    arena, one block    | layer: K heads, V heads, each [block_size tokens, head_dim] | layer ...
    dense, one chunk    | the same, of its tokens only |

A whole block is one span on both sides; neighbours are copied as one. Copies are torch's: they
release the GIL, and the arena may be on a device.
"""

from collections.abc import Iterable

import torch

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.items import STATES, Item, Place
from engine.arena import ArenaMemory

Packed = tuple[Item, Place, int]
"""An item, its place in the arena, and its byte offset in the dense bytes."""


class ArenaItems:
    """The items of one arena."""

    def __init__(self, chunks: ChunkPlan, arena: ArenaMemory) -> None:
        self.chunks = chunks
        self._arena = arena

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
        # (arena, dense, length) of a span that grows while the next one follows it on both sides.
        first = there = length = 0
        for item, place, offset in packed:
            for start, nbytes in self._spans(item, place):
                if start == first + length and offset == there + length:
                    length += nbytes
                else:
                    self._copy_span(dense, (first, there, length), to_arena=to_arena)
                    first, there, length = start, offset, nbytes
                offset += nbytes
            if self._is_part(item, place):
                self._copy_part(item, place, dense[offset:], to_arena=to_arena)
        self._copy_span(dense, (first, there, length), to_arena=to_arena)

    def _copy_span(
        self, dense: torch.Tensor, span: tuple[int, int, int], *, to_arena: bool
    ) -> None:
        first, there, length = span
        if length:
            here = self._arena.tensor[first : first + length]
            other = dense[there : there + length]
            _ = here.copy_(other) if to_arena else other.copy_(here)

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

    def _spans(self, item: Item, place: Place) -> list[tuple[int, int]]:
        """(offset, bytes) in the arena of what lies there as it lies in dense bytes."""
        plan = self.chunks.arena
        if item.group == STATES:
            pairs = zip(plan.state_groups, place.blocks, strict=True)
            return [(plan.block_offset(g, block), plan.block_bytes(g)) for g, block in pairs]
        if self._is_part(item, place):
            return []
        return [(plan.block_offset(item.group, place.blocks[0]), plan.block_bytes(item.group))]

    def _is_part(self, item: Item, place: Place) -> bool:
        if item.group == STATES:
            return False
        return item.end - item.start < self.chunks.arena.block_size_of(item.group)
