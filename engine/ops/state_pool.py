"""The states of a packed batch, taken out of their pool for an operator and put back.

rows    decode 0 .. d-1 | segment 0     | segment 1 ...
units   u0 .. u(d-1)    | u(d)          | u(d+1)
        one step each   | chunked scans, which may export states from inside
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.forward import StateIndex

Step = Callable[[Sequence[Tensor], Tensor], Tensor]
"""(rows [S, ...], states [S, ...] updated IN PLACE) -> y [S, ...]."""
Chunk = Callable[
    [Sequence[Tensor], Tensor, list[int], list[tuple[int, int]]], tuple[Tensor, Tensor, Tensor]
]
"""(rows [T, ...], initial states, query lengths, exports) -> (y [T, ...], final, exported)."""


def move_states(
    rows: Sequence[Tensor],
    pool: Tensor,
    index: StateIndex,
    step: Step,
    chunk: Chunk,
    *,
    wide: bool = False,
) -> Tensor:
    """y [T, ...] of all rows; the sequences' states move on in the pool, exports are written.

    `wide`: the operator computes on float32 states, whatever the pool keeps.
    """
    decodes = index.lens.num_decodes
    lens = index.lens.query_lens[decodes:]
    if not lens:
        return _decode(rows, pool, index, step, wide=wide)
    tail = move_segments([x[decodes:] for x in rows], pool, index, chunk, wide=wide)
    if not decodes:
        return tail
    return torch.cat([_decode([x[:decodes] for x in rows], pool, index, step, wide=wide), tail])


def segment_parts(pool: Tensor, index: StateIndex) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Cuts every prefill segment at its exports: gives rows, state before, place of the next one.

    The last part writes over the segment's own state; it has no rows where an export ends there.
    """
    decodes = index.lens.num_decodes
    lens, units = index.lens.query_lens[decodes:], index.units[decodes:].tolist()
    for segment, (length, unit) in enumerate(zip(lens, units, strict=True)):
        done, before = 0, pool[unit]
        inside = [(one.offset, one.unit) for one in index.exports if one.segment == segment]
        for end, place in [*inside, (length, unit)]:
            after = pool[place]
            yield end - done, before, after
            done, before = end, after


def _decode(
    rows: Sequence[Tensor], pool: Tensor, index: StateIndex, step: Step, *, wide: bool
) -> Tensor:
    # Consecutive units are a view: their states are updated where they lie.
    run = index.decode_run
    units = index.units[: index.lens.num_decodes] if run is None else None
    kept = pool[run] if units is None else _gather(pool, units)
    used = kept.float() if wide else kept
    y = step(rows, used)
    if units is not None:
        pool.index_copy_(0, units, used.to(pool.dtype))
    elif used is not kept:
        kept.copy_(used)
    return y


def move_segments(
    rows: Sequence[Tensor], pool: Tensor, index: StateIndex, chunk: Chunk, *, wide: bool = False
) -> Tensor:
    """As `move_states`, of the prefill segments only; `rows` are theirs."""
    lens = index.lens.query_lens[index.lens.num_decodes :]
    units = index.units[-len(lens) :]
    # The operator leaves `initial` as it is, so exports and final states are written back apart.
    initial = _gather(pool, units)
    exports = [(export.segment, export.offset) for export in index.exports]
    y, final, exported = chunk(rows, initial.float() if wide else initial, lens, exports)
    pool.index_copy_(0, units, final.to(pool.dtype))
    for export, state in zip(index.exports, exported, strict=True):
        pool[export.unit] = state
    return y


def _gather(pool: Tensor, units: Tensor) -> Tensor:
    """Copies of some units; a flat row per unit makes it a plain copy on CPU."""
    return pool.flatten(1).index_select(0, units).view(-1, *pool.shape[1:])
