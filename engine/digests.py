"""Digests of blocks: one rule for host and device, xxh3-64 by pieces of 64 KiB.

    bytes     |   64 KiB   |   64 KiB   |   64 KiB   + rest |      a block's spans, in their order
    pieces    |  xxh3-64   |  xxh3-64   |      xxh3-64      |      8 bytes each, little-endian
    digest    |        xxh3-64 of these 24 bytes            |

A block of less than 128 KiB is one piece, and its digest is that of the piece. The rest joins the
last piece: so only tiny blocks are of 240 bytes or less, which xxh3 hashes in other ways. A device
hashes pieces side by side; one xxh3-64 over a state of 17 MB would be one long chain there. Imports
no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from struct import pack

from xxhash import xxh3_64, xxh3_64_intdigest

PIECE_BYTES = 64 << 10
ReadBytes = Callable[[int, int], memoryview]
"""Offset and length -> bytes on the host (`engine.arena.ArenaMemory.read`)."""
Spans = Sequence[tuple[int, int]]
"""(offset, length) of the bytes of one block, in their order."""
DigestBlocks = Callable[[Sequence[Spans]], list[int]]
"""The digest of each block (`engine.arena.ArenaMemory.digests`)."""


def digest(read: ReadBytes, spans: Spans) -> int:
    """The digest of one block or state.

    Finds damage and mix-ups on the way, not forgery: peers are authenticated.
    """
    # The cut is written out for one span, the usual case: 128 pieces are 0.4 ms, and a call that
    # finds each piece's spans would add a third.
    if len(spans) == 1:
        offset, length = spans[0]
        whole, last = read(offset, length), num_pieces(length) - 1
        if not last:
            return xxh3_64_intdigest(whole)
        starts = range(0, last * PIECE_BYTES, PIECE_BYTES)
        pieces = [xxh3_64_intdigest(whole[at : at + PIECE_BYTES]) for at in starts]
        pieces.append(xxh3_64_intdigest(whole[last * PIECE_BYTES :]))
        return combined(pieces)
    return combined([_hashed(read, piece) for piece in in_pieces(spans)])


def combined(pieces: Sequence[int]) -> int:
    """The digest of a block, given those of its pieces."""
    if len(pieces) == 1:
        return pieces[0]
    return xxh3_64_intdigest(pack(f"<{len(pieces)}Q", *pieces))


def num_pieces(nbytes: int) -> int:
    """Pieces of a block of so many bytes; at least 1."""
    return max(nbytes // PIECE_BYTES, 1)


def in_pieces(spans: Spans) -> Iterator[list[tuple[int, int]]]:
    """The spans of each piece of a block; a piece may cross from one span into the next.

    spans    |------a------|----b----|--------c--------|
    pieces   |   a   |  a b  |  b c  |       c         |
    """
    pieces = num_pieces(sum(length for _, length in spans))
    piece: list[tuple[int, int]] = []
    room = PIECE_BYTES
    for offset, length in spans:
        # All that is left once the last piece has begun is of that piece.
        while pieces > 1 and length >= room:
            piece.append((offset, room))
            yield piece
            offset, length = offset + room, length - room
            piece, room, pieces = [], PIECE_BYTES, pieces - 1
        if length:
            piece.append((offset, length))
            room -= length
    yield piece


def _hashed(read: ReadBytes, piece: Spans) -> int:
    hashed = xxh3_64()
    for offset, length in piece:
        hashed.update(read(offset, length))
    return hashed.intdigest()
