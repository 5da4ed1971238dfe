"""How the ucx transport cuts a read: parts of a few MiB, each asked for with one request.

Knows spans and sizes; no messages, peers or threads.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from connector.transports.base import SpanPair
from connector.transports.ucx_server import MAX_PART_SPANS
from connector.transports.ucx_worker import Bytes

PART_BYTES = 2 << 20
DIRECT_BYTES = 256 * 1024
"""Spans from here on arrive in the arena itself, smaller ones together through a buffer."""


@dataclass(slots=True, frozen=True)
class Part:
    """Spans that are asked for together; joined they travel as one message, else each as its own.

    So many spans cost one request, and no large one is copied to be sent or received.
    """

    spans: tuple[SpanPair, ...]
    joined: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(span.length for span in self.spans)

    def scatter(self, buffer: Bytes, arena: Bytes) -> None:
        """From the one message to where the spans belong."""
        source, target = buffer.ctypes.data, arena.ctypes.data
        for span in self.spans:
            ctypes.memmove(target + span.local, source, span.length)
            source += span.length


@dataclass(slots=True)
class _Batch:
    """A part that still grows."""

    joined: bool
    room: int = PART_BYTES
    spans: list[SpanPair] = field(default_factory=list)

    def takes(self, piece: SpanPair) -> bool:
        return piece.length <= self.room and len(self.spans) < MAX_PART_SPANS

    def add(self, piece: SpanPair) -> None:
        self.spans.append(piece)
        self.room -= piece.length

    def part(self) -> Part:
        return Part(tuple(self.spans), self.joined and len(self.spans) > 1)


def plan_parts(spans: Sequence[SpanPair]) -> Iterator[Part]:
    """Every byte in one part of at most PART_BYTES: large spans among themselves, and small ones.

    Longer spans than PART_BYTES are cut.
    """
    growing = {joined: _Batch(joined) for joined in (False, True)}
    for piece in _pieces(spans):
        joined = piece.length < DIRECT_BYTES
        if not growing[joined].takes(piece):
            yield growing[joined].part()
            growing[joined] = _Batch(joined)
        growing[joined].add(piece)
    yield from (batch.part() for batch in growing.values() if batch.spans)


def _pieces(spans: Sequence[SpanPair]) -> Iterator[SpanPair]:
    for remote, local, length in spans:
        for start in range(0, length, PART_BYTES):
            yield SpanPair(remote + start, local + start, min(PART_BYTES, length - start))
