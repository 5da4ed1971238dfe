"""Packed segments on a grid of equal chunks: work inside chunks is one batch over all segments.

Chunks are ordered by step of the scan, the segment with most chunks first, so that a sequential
scan touches consecutive chunks. A chunk ends early where a state is exported, so that the scan
passes it anyway. Pads are zeros.

    segments   A: 65 tokens    B: 130 tokens, of which state 100 is exported
    step            0           |       1          |    2
    chunks     B 0-63 | A 0-63  | B 64-99 | A 64   | B 100-129
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import log

import torch
from torch import Tensor

CHUNK = 64
# Decays are powers of 2: on CPU torch's exp is 20 to 60 times slower where results underflow.
LOG2_E = 1.0 / log(2.0)


@dataclass(slots=True, frozen=True)
class _Rows:
    """int64: the grid row of each token, the token of each grid row (0 in pads), rows of pads."""

    of_tokens: Tensor
    tokens: Tensor
    pads: Tensor

    @classmethod
    def of(cls, of_tokens: Tensor, rows: int, device: torch.device) -> "_Rows":
        tokens = torch.full((rows,), -1)
        tokens[of_tokens] = torch.arange(len(of_tokens))
        pads = (tokens < 0).nonzero()[:, 0]
        return cls(of_tokens.to(device), tokens.clamp_(min=0).to(device), pads.to(device))


@dataclass(slots=True, frozen=True)
class ChunkGrid:
    """`active[i]`: segments with a chunk at step i; `order`: most chunks first (None: as given).

    `rows`: where the tokens are (None: in order from the first row on, all pads after them).
    `exports`: segment of each export and the chunk that starts there (None: the segment ends).
    """

    tokens: int
    active: list[int]
    order: Tensor | None
    rows: _Rows | None
    exports: list[tuple[int, int | None]]

    @classmethod
    def over(
        cls,
        query_lens: list[int],
        device: torch.device,
        exports: Sequence[tuple[int, int]] = (),
    ) -> "ChunkGrid":
        """The grid of segments of `query_lens` tokens, end to end, none of them empty.

        `exports`: (segment, offset) of each asked-for state. Raises ValueError for one that is
        not inside of a segment.
        """
        return _grid(tuple(query_lens), device, tuple(exports))

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H, ...] -> a new float32 [chunks, H, CHUNK, ...], zeros in the pads."""
        chunks = sum(self.active)
        if self.rows is not None:
            # Two to four times faster than writing the tokens' rows into zeros.
            x = x.index_select(0, self.rows.tokens).index_fill_(0, self.rows.pads, 0.0)
        elif self.tokens < chunks * CHUNK:
            x = torch.cat([x, x.new_zeros(chunks * CHUNK - self.tokens, *x.shape[1:])])
        spread = x.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2)
        return spread.to(torch.float32, memory_format=torch.contiguous_format, copy=True)

    def collect(self, x: Tensor) -> Tensor:
        """[chunks, H, CHUNK, ...] -> the tokens' rows, contiguous [T, H, ...]."""
        rows = x.transpose(1, 2).flatten(0, 1)
        if self.rows is None:
            return rows[: self.tokens].contiguous()
        return rows.index_select(0, self.rows.of_tokens)

    def sort(self, states: Tensor) -> Tensor:
        """States [S, ...] of the segments, most chunks first."""
        return states if self.order is None else states.index_select(0, self.order)

    def unsort(self, states: Tensor) -> Tensor:
        """Undoes `sort`."""
        if self.order is None:
            return states
        return torch.empty_like(states).index_copy_(0, self.order, states)

    def exported(self, starts: Tensor, final: Tensor) -> Tensor:
        """[E, ...]: from the states at the start of each chunk and, unsorted, the final ones."""
        states = (
            final[segment : segment + 1] if chunk is None else starts[chunk : chunk + 1]
            for segment, chunk in self.exports
        )
        return torch.cat([final[:0], *states])


# All recurrent layers of a step ask for the same grid, and on a device each would copy it there.
@lru_cache(maxsize=4)
def _grid(
    query_lens: tuple[int, ...], device: torch.device, exports: tuple[tuple[int, int], ...]
) -> ChunkGrid:
    of_exports = cuts(query_lens, exports)
    # Every CHUNK tokens, counted anew from each cut.
    starts = [
        [start for pair in pairwise(sorted({0, *own, n})) for start in range(*pair, CHUNK)]
        for n, own in zip(query_lens, of_exports, strict=True)
    ]
    # Most chunks first: at every step of a scan the segments still running are a prefix.
    order = sorted(range(len(starts)), key=lambda one: (-len(starts[one]), -query_lens[one]))
    active = [sum(len(own) > step for own in starts) for step in range(len(starts[order[0]]))]
    first_chunk = list(accumulate(active, initial=0))
    rank = {segment: place for place, segment in enumerate(order)}
    # For each segment: start of a chunk -> its number on the grid.
    chunks = [
        {start: first_chunk[step] + rank[segment] for step, start in enumerate(own)}
        for segment, own in enumerate(starts)
    ]
    of_tokens = _token_rows(query_lens, chunks)
    return ChunkGrid(
        sum(query_lens),
        active,
        None if len(order) == 1 else torch.tensor(order, device=device),
        None if of_tokens is None else _Rows.of(of_tokens, sum(active) * CHUNK, device),
        [(segment, chunks[segment].get(offset)) for segment, offset in exports],
    )


def cuts(query_lens: Sequence[int], exports: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The offsets of each segment's exports.

    Raises ValueError for one that is not inside of its segment.
    """
    offsets: list[list[int]] = [[] for _ in query_lens]
    for segment, offset in exports:
        if not (0 <= segment < len(offsets) and 0 < offset <= query_lens[segment]):
            raise ValueError(
                f"export ({segment}, {offset}) is in none of the segments of {[*query_lens]} "
                "tokens; an offset counts the segment's tokens before it, from 1 to all"
            )
        offsets[segment].append(offset)
    return offsets


def _token_rows(query_lens: Sequence[int], chunks: list[dict[int, int]]) -> Tensor | None:
    """The grid row of each token; None where that is the token's own number."""
    sizes, shifts, base = [], [], 0
    for length, own in zip(query_lens, chunks, strict=True):
        sizes += [end - start for start, end in pairwise([*own, length])]
        shifts += [chunk * CHUNK - base - start for start, chunk in own.items()]
        base += length
    if not any(shifts):
        return None
    return torch.arange(base) + torch.tensor(shifts).repeat_interleave(torch.tensor(sizes))
