"""Packed segments on a grid of equal chunks: work inside chunks is one batch over all segments.

Chunks are ordered by step: chunk 0 of every segment, then chunk 1 of those that have one, and so
on, longest segment first; so a sequential scan touches one run of chunks per step. Pads are zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64


@dataclass(slots=True, frozen=True)
class ChunkGrid:
    """`active[i]`: segments with a chunk at step i; `order`: longest first (None: as given).

    `rows` int64 [T]: the grid row of each token (None: the tokens fill the grid in order).
    """

    active: list[int]
    order: Tensor | None
    rows: Tensor | None

    @classmethod
    def over(cls, query_lens: list[int], device: torch.device) -> "ChunkGrid":
        """The grid of segments of `query_lens` tokens, end to end, none of them empty."""
        order = sorted(range(len(query_lens)), key=lambda segment: -query_lens[segment])
        counts = [-(-query_lens[segment] // CHUNK) for segment in order]
        active = [sum(count > step for count in counts) for step in range(counts[0])]
        if len(order) == 1:
            length = query_lens[0]
            whole = length == len(active) * CHUNK
            return cls(active, None, None if whole else torch.arange(length, device=device))
        rows = _token_rows(query_lens, order, active)
        return cls(active, torch.tensor(order, device=device), rows.to(device))

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H, ...] -> a new float32 [chunks, H, CHUNK, ...], zeros in the pads."""
        chunks = sum(self.active)
        if self.rows is None:
            grid = x
        else:
            grid = x.new_zeros(chunks * CHUNK, *x.shape[1:]).index_copy_(0, self.rows, x)
        spread = grid.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2)
        return spread.to(torch.float32, memory_format=torch.contiguous_format, copy=True)

    def collect(self, x: Tensor) -> Tensor:
        """[chunks, H, CHUNK, ...] -> the tokens' rows, [T, H, ...]."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.rows is None else rows.index_select(0, self.rows)

    def sort(self, states: Tensor) -> Tensor:
        """States [S, ...] of the segments, longest segment first."""
        return states if self.order is None else states.index_select(0, self.order)

    def unsort(self, states: Tensor) -> Tensor:
        """Undoes `sort`."""
        if self.order is None:
            return states
        return torch.empty_like(states).index_copy_(0, self.order, states)


def _token_rows(query_lens: list[int], order: list[int], active: list[int]) -> Tensor:
    rank = {segment: place for place, segment in enumerate(order)}
    first_chunk = [sum(active[:step]) for step in range(len(active))]
    pieces = []
    for segment, length in enumerate(query_lens):
        for step, start in enumerate(range(0, length, CHUNK)):
            row = (first_chunk[step] + rank[segment]) * CHUNK
            pieces.append(torch.arange(row, row + min(CHUNK, length - start)))
    return torch.cat(pieces)
