"""Digests of blocks, against the rule written once more, on whole copies of the bytes."""

import random
from collections.abc import Sequence
from itertools import pairwise
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from engine.digests import PIECE_BYTES, Spans, digest, in_pieces, num_pieces

CONTENT = random.Random(1).randbytes(5 * PIECE_BYTES)
LENGTHS = [0, 1, 240, 241, 16 << 10, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]
LENGTHS += [2 * PIECE_BYTES - 1, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1, 3 * PIECE_BYTES - 240]
LENGTHS += [4 * PIECE_BYTES, 4 * PIECE_BYTES + 7, len(CONTENT)]
PLACES = st.integers(0, 300) | st.sampled_from(
    [number * PIECE_BYTES + by for number in range(4) for by in (-1, 0, 1, 240)]
)


def read(offset: int, length: int) -> memoryview:
    return memoryview(CONTENT)[offset : offset + length]


def by_the_rule(content: bytes) -> int:
    """As the drawing of `engine.digests` says it."""
    pieces = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
    if len(pieces) > 1 and len(pieces[-1]) < PIECE_BYTES:
        pieces[-2:] = [pieces[-2] + pieces[-1]]
    if len(pieces) < 2:
        return xxh3_64_intdigest(content)
    return xxh3_64_intdigest(b"".join(pack("<Q", xxh3_64_intdigest(piece)) for piece in pieces))


def spans_of(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The first `length` bytes, cut at some places; of empty spans there may be several."""
    places = sorted([0, length, *(cut for cut in cuts if 0 <= cut < length)])
    return [(start, end - start) for start, end in pairwise(places)]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_digest_is_that_of_its_pieces(length: int) -> None:
    assert digest(read, [(0, length)]) == by_the_rule(CONTENT[:length])


@given(st.sampled_from(LENGTHS), st.lists(PLACES, max_size=5))
def test_in_however_many_spans_the_bytes_lie(length: int, cuts: list[int]) -> None:
    spans = spans_of(length, cuts)
    assert digest(read, spans) == by_the_rule(CONTENT[:length])
    pieces = list(in_pieces(spans))
    sizes = [sum(length for _, length in piece) for piece in pieces]
    assert len(pieces) == num_pieces(length)
    assert sizes[:-1] == [PIECE_BYTES] * (len(pieces) - 1)
    assert len(pieces) == 1 or PIECE_BYTES <= sizes[-1] < 2 * PIECE_BYTES
    assert joined(pieces) == joined([spans])


def joined(pieces: Sequence[Spans]) -> list[int]:
    """All places in their order."""
    return [place for piece in pieces for start, n in piece for place in range(start, start + n)]


def test_bytes_in_another_order_have_another_digest() -> None:
    halves = [(0, 2 * PIECE_BYTES), (2 * PIECE_BYTES, 2 * PIECE_BYTES)]
    assert digest(read, halves) != digest(read, halves[::-1])
