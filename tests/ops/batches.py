"""Batches for the operators that move states, and what an operator's `naive.py` makes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.forward import SequenceLens, StateExport, StateIndex

Chunk = Callable[[list[int], Tensor, list[tuple[int, int]]], tuple[Tensor, Tensor, Tensor]]
"""(query lengths, initial states, exports) -> (y, final states, exported ones), as in `naive.py`.

The first sequences may be decodes: segments of one token.
"""

NUM_UNITS = 12
GAP = 5
"""Numbers of something else between the states of two units."""


@dataclass(slots=True, frozen=True)
class Batch:
    """`units` of the sequences are in no order, as after some requests have ended."""

    decodes: int
    lens: list[int]
    units: list[int]
    exports: tuple[StateExport, ...] = ()

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lens)

    def index(self) -> StateIndex:
        """As the engine makes it."""
        lens = SequenceLens(self.decodes, self.lens, [0] * len(self.lens))
        return StateIndex(torch.tensor(self.units), None, lens, self.exports)


EXPORTS = (StateExport(0, 2, 0), StateExport(0, 66, 11), StateExport(1, 1, 6))
BATCHES: Mapping[str, Batch] = {
    "one decode": Batch(1, [1], [4]),
    "decodes": Batch(5, [1] * 5, [4, 2, 9, 3, 7]),
    "segments": Batch(0, [70, 3, 2, 1], [5, 1, 8, 2], EXPORTS),
    "mixed": Batch(3, [1, 1, 1, 67, 2], [8, 1, 7, 3, 10], EXPORTS),
}


def pool_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """States of NUM_UNITS units, GAP numbers apart; the same ones at every call."""
    size = torch.Size(shape).numel() + GAP
    draw = torch.Generator().manual_seed(3)
    memory = torch.randn(NUM_UNITS, size, generator=draw).to(dtype)
    contiguous = torch.empty(NUM_UNITS, *shape).stride()
    return memory.as_strided((NUM_UNITS, *shape), (size, *contiguous[1:]))


def memory_of(pool: Tensor) -> Tensor:
    """All numbers of a pool, those between its units too."""
    return pool.as_strided((NUM_UNITS, pool.stride(0)), (pool.stride(0), 1))


def moved(pool: Tensor, batch: Batch, chunk: Chunk) -> Tensor:
    """y of all rows; the states of `pool` move on as they must."""
    exports = [(batch.decodes + one.segment, one.offset) for one in batch.exports]
    y, final, exported = chunk(batch.lens, pool[batch.units].clone(), exports)
    pool[batch.units] = final
    for one, state in zip(batch.exports, exported, strict=True):
        pool[one.unit] = state
    return y
