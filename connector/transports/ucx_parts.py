"""The parts of a read over ucx: a few MiB each, asked for with one request.

Knows spans and sizes; no messages, peers or threads.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from connector.transports.base import SpanPair, cut, gather
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


def plan_parts(spans: Sequence[SpanPair]) -> Iterator[Part]:
    """Every byte in one part of at most PART_BYTES: first the large spans, then the small ones.

    Longer spans than PART_BYTES are cut.
    """
    pieces = list(cut(spans, PART_BYTES))
    for joined in (False, True):
        alike = (piece for piece in pieces if (piece.length < DIRECT_BYTES) is joined)
        for batch in gather(alike, most_bytes=PART_BYTES, most_spans=MAX_PART_SPANS):
            yield Part(tuple(batch), joined and len(batch) > 1)
