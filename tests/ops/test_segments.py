"""Where segments, pieces, chunks and rounds of a batch begin and end."""

import pytest
import torch

from engine.forward import StateExport
from engine.ops.segments import Segments
from tests.ops.batches import Batch


def of(lens: list[int], *exports: StateExport) -> Segments:
    return Segments.of(Batch(1, [1, *lens], [9, *range(len(lens))], exports).index())


def test_all_segments_are_one_round_without_exports() -> None:
    found = of([130, 3])
    assert found.longest == 130
    assert found.starts.tolist() == found.pieces.starts.tolist() == [0, 130, 133]
    assert found.pieces.starts_there.tolist() == [0, 130, 133]
    assert found.chunks.tolist() == [[0, 64, -1], [64, 64, -1], [128, 2, -1], [130, 3, -1]]
    assert found.chunk_starts.tolist() == [0, 3, 4]
    assert found.pieces.chunks.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert found.export_starts.tolist() == [0, 0, 0]
    (only,) = found.rounds
    assert only.pieces is found.pieces
    assert [only.rows, only.continued, only.exported, only.ended, only.segments] == [None] * 5


def test_pieces_and_chunks_end_at_exports() -> None:
    found = of([5, 100], StateExport(1, 66, 7), StateExport(1, 100, 8))
    assert found.pieces.starts.tolist() == [0, 5, 71, 105]
    assert found.chunks.tolist() == [[0, 5, -1], [5, 64, -1], [69, 2, 7], [71, 34, 8]]
    assert found.export_starts.tolist() == [0, 0, 2]
    assert found.export_offsets.tolist() == [66, 100]
    first, second = found.rounds
    assert first.rows is not None
    assert first.rows.tolist() == list(range(71))
    assert second.rows is not None
    assert second.rows.tolist() == list(range(71, 105))
    tensors = [first.exported, first.export_units, first.ended, first.segments]
    tensors += [second.continued, second.exported, second.export_units, second.segments]
    assert [t if t is None else t.tolist() for t in tensors] == [
        [1],
        [7],
        [0],
        [0],
        [1],
        [0],
        [8],
        [1],
    ]


def test_equal_batches_share_their_tensors_and_lists_start_at_16_bytes() -> None:
    found = of([5, 4, 3], StateExport(0, 2, 7))
    assert found is of([5, 4, 3], StateExport(0, 2, 7))
    assert found is not of([5, 4, 3], StateExport(0, 2, 6))
    lists = [found.starts, found.export_starts, found.export_offsets, found.chunks]
    assert {t.storage_offset() % 2 for t in lists} == {0}
    assert found.starts.dtype == torch.int64


def test_exports_that_are_nowhere_or_twice_there_are_named() -> None:
    with pytest.raises(ValueError, match=r"export \(0, 6\)"):
        of([5], StateExport(0, 6, 7))
    with pytest.raises(ValueError, match="two of the exports"):
        of([5], StateExport(0, 2, 7), StateExport(0, 2, 8))
