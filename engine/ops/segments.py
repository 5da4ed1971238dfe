"""Where the prefill segments of a batch begin and end, as tensors on their device.

All layers of a step ask for the same ones. They are made from the lists of a `StateIndex` and sent
to the device in one copy; nothing is asked back. Rows are counted from the first segment's.

    rows      0 ................ 129 | 130 ........ 199
    segments  0                      | 1
    pieces    0: to row 99  | 1      | 2                   a state is exported after 100 tokens
    chunks    0-63 | 64-99  | 100-129| 130-193 | 194-199   64 tokens, counted anew in each piece
    rounds    first         | second | first               what one chunked scan computes at once
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from engine.forward import StateExport, StateIndex
from engine.ops.chunk_grid import CHUNK, cuts


@dataclass(slots=True, frozen=True)
class Pieces:
    """Runs of tokens, end to end, that are scanned side by side; all int64.

    `starts` [P + 1]: their first rows and the end, on the device and, `starts_there`, on the host;
    `chunks` [C, 2]: the piece of each chunk and its number there.
    """

    starts: Tensor
    starts_there: Tensor
    chunks: Tensor


@dataclass(slots=True, frozen=True)
class Round:
    """The next piece of every segment that has one: what can be computed before any later piece.

    All int64. `rows`: those of its pieces, None for all in order. `continued`: of each piece, the
    place of the one before it in the last round; None in the first. `exported`: pieces after which
    a state is exported, and `export_units`; None without any. `ended`: pieces that are their
    segment's last, and `segments`, these; both None where all segments end in the first round.
    """

    pieces: Pieces
    rows: Tensor | None
    continued: Tensor | None
    exported: Tensor | None
    export_units: Tensor | None
    ended: Tensor | None
    segments: Tensor | None


@dataclass(slots=True, frozen=True)
class Segments:
    """S segments, of which the longest has `longest` tokens; all int64 on the device.

    `starts` [S + 1]: first rows, and the end. `export_starts` [S + 1]: of each segment the first of
    its exports, and the end; `export_offsets` and `export_units` [E]. `chunk_starts` [S + 1]: the
    same of chunks; `chunks` [C, 3]: first row, tokens, and the unit of the export after it or -1.
    """

    longest: int
    starts: Tensor
    export_starts: Tensor
    export_offsets: Tensor
    export_units: Tensor
    chunk_starts: Tensor
    chunks: Tensor
    pieces: Pieces
    rounds: tuple[Round, ...]

    @classmethod
    def of(cls, index: StateIndex) -> "Segments":
        """The prefill segments of a batch, of which there is one at least, none of them empty.

        Raises ValueError for an export that is not inside of its segment, or has no place of its
        own there.
        """
        lens = index.lens.query_lens[index.lens.num_decodes :]
        return _segments(tuple(lens), index.exports, index.units.device)


@dataclass(slots=True, frozen=True)
class _Piece:
    """Rows `start` to `end`; `unit` receives the state after them, -1: there is no export."""

    segment: int
    start: int
    end: int
    unit: int
    last: bool

    def chunks(self) -> range:
        """First rows."""
        return range(self.start, self.end, CHUNK)


# As many as a step has KV cache groups of states, and more: their exports have other units.
@lru_cache(maxsize=16)
def _segments(
    query_lens: tuple[int, ...], exports: tuple[StateExport, ...], device: torch.device
) -> Segments:
    places = [(one.segment, one.offset) for one in exports]
    own = cuts(query_lens, places)
    if len(set(places)) < len(places):
        raise ValueError(f"two of the exports {places} are of one state")
    cut = list(_cut(query_lens, exports))
    chunks = [
        (start, min(CHUNK, one.end - start), one.unit if start + CHUNK >= one.end else -1)
        for one in cut
        for start in one.chunks()
    ]
    num_chunks = [0] * len(query_lens)
    for one in cut:
        num_chunks[one.segment] += len(one.chunks())
    starts, export_starts, offsets, units, chunk_starts, table = _send(
        device,
        [*accumulate(query_lens, initial=0)],
        [*accumulate(map(len, own), initial=0)],
        [one.offset for one in exports],
        [one.unit for one in exports],
        [*accumulate(num_chunks, initial=0)],
        [number for chunk in chunks for number in chunk],
    )
    pieces = _pieces(cut, device)
    return Segments(
        longest=max(query_lens),
        starts=starts,
        export_starts=export_starts,
        export_offsets=offsets,
        export_units=units,
        chunk_starts=chunk_starts,
        chunks=table.view(-1, 3),
        pieces=pieces,
        rounds=tuple(_rounds(cut, pieces, device)),
    )


def _cut(query_lens: Sequence[int], exports: Sequence[StateExport]) -> Iterator[_Piece]:
    """All segments, in order, each cut after the tokens of its exports."""
    first = 0
    for segment, length in enumerate(query_lens):
        units = {one.offset: one.unit for one in exports if one.segment == segment}
        for start, end in pairwise(sorted({0, *units, length})):
            unit = units.get(end, -1)
            yield _Piece(segment, first + start, first + end, unit, end == length)
        first += length


def _pieces(cut: Sequence[_Piece], device: torch.device) -> Pieces:
    # Their rows are packed: where pieces are not neighbours, those are gathered before.
    starts = [*accumulate((one.end - one.start for one in cut), initial=0)]
    numbers = [
        number
        for place, one in enumerate(cut)
        for chunk in range(len(one.chunks()))
        for number in (place, chunk)
    ]
    there, chunks = _send(device, starts, numbers)
    return Pieces(there, torch.tensor(starts), chunks.view(-1, 2))


def _rounds(cut: Sequence[_Piece], every: Pieces, device: torch.device) -> Iterator[Round]:
    """`every`: all of `cut`, which one round computes if nothing is exported from inside."""
    waiting: list[list[_Piece]] = []
    for one in cut:
        if not waiting or waiting[-1][0].segment != one.segment:
            waiting.append([])
        waiting[-1].append(one)
    before: list[_Piece] = []
    while waiting:
        now = [own.pop(0) for own in waiting]
        waiting = [own for own in waiting if own]
        yield _round(now, before, every if len(now) == len(cut) else None, device)
        before = now


def _round(
    now: Sequence[_Piece], before: Sequence[_Piece], pieces: Pieces | None, device: torch.device
) -> Round:
    """`pieces`: those of `now` where they are there already."""
    places = {one.segment: place for place, one in enumerate(before)}
    exported = [place for place, one in enumerate(now) if one.unit >= 0]
    ended = [place for place, one in enumerate(now) if one.last]
    rows, continued, at, units, last, segments = _send(
        device,
        [row for one in now for row in range(one.start, one.end)] if pieces is None else [],
        [places[one.segment] for one in now] if before else [],
        exported,
        [now[place].unit for place in exported],
        ended,
        [now[place].segment for place in ended],
    )
    all_end = not before and len(ended) == len(now)
    return Round(
        pieces=_pieces(now, device) if pieces is None else pieces,
        rows=rows if pieces is None else None,
        continued=continued if before else None,
        exported=at if exported else None,
        export_units=units if exported else None,
        ended=None if all_end else last,
        segments=None if all_end else segments,
    )


def _send(device: torch.device, *lists: Sequence[int]) -> list[Tensor]:
    """Each list as int64 there, in one copy."""
    numbers: list[int] = []
    places = []
    for one in lists:
        places.append(slice(len(numbers), len(numbers) + len(one)))
        numbers += one
        # Kernels are compiled anew for other alignments: each list starts at 16 bytes.
        numbers += [0] * (len(one) % 2)
    there = torch.tensor(numbers, dtype=torch.int64).to(device)
    return [there[place] for place in places]
