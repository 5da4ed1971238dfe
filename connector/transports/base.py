"""The interface of a transport: one-sided reads of spans of bytes from a peer's memory into ours.

Knows bytes, regions, spans and peers; not blocks, requests or leases. There is no `write`, `notify`
or `notices`: D reads and nobody pushes, and control messages travel on gRPC.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.arena import ArenaMemory
from engine.errors import TransportError

HAS_ARENA = "this transport has an arena already; open one transport per arena"


class SpanPair(NamedTuple):
    """`length` bytes at `remote` in a peer's region, wanted at `local` in ours; byte offsets."""

    remote: int
    local: int
    length: int


class Transfer(ABC):
    """One read under way; it ends by itself, by an error or by `cancel`."""

    @abstractmethod
    def poll(self) -> bool:
        """Progress without blocking; True once all bytes are here.

        Raises TransportError after a failure or `cancel`.
        """

    @abstractmethod
    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        """Return once the first `nbytes` of all spans, in their order, are here; None: all.

        More may be. Raises TransferTimeoutError after `timeout_s` seconds, with the read cancelled,
        and TransportError when it failed.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Stop it and free its handles: no late byte can reach the local arena. Idempotent."""


class Transport(ABC):
    """One-sided reads between the memory of this node and that of connected peers.

    Methods may be called from several threads. Every failure is a TransportError.
    """

    name: str

    @abstractmethod
    def register(self, *regions: ArenaMemory) -> None:
        """Make `regions` readable by peers, once. A read goes to our region of the same number."""

    @property
    @abstractmethod
    def address(self) -> bytes:
        """The address that peers `connect` to; it changes when the memory is served anew.

        Raises TransportError before `register`.
        """

    def listens_at(self, address: bytes) -> str | None:
        """The IP address to which a peer's address leads.

        None where it leads to no host, or only a library can tell. Raises TransportError.
        """
        return None

    @abstractmethod
    def connect(self, peer: str, address: bytes) -> None:
        """Make `peer`'s memory readable.

        The same address again changes nothing; another one (the peer restarted) replaces the old
        one and drops its mapping. `address` is untrusted: raises TransportError.
        """

    @abstractmethod
    def read(self, peer: str, spans: Sequence[SpanPair], region: int = 0) -> Transfer:
        """Start copying `spans` from `peer`'s memory into ours, within one region.

        All spans are checked against both sides before the first byte moves; the error names the
        span. Local spans must not overlap. Cancelling a pending read may fail the transport's other
        pending reads; connections come back with the next read.
        Few large spans are fast, so join neighbours first.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Drop the peer's mapping or agent; unknown peers are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Give back transfers, mappings, registrations and handles. Idempotent."""


def check_spans(spans: Sequence[SpanPair], *, remote_nbytes: int, local_nbytes: int) -> None:
    """Raise TransportError naming the first span that is not inside both regions."""
    for index, span in enumerate(spans):
        if span.length < 1 or span.remote < 0 or span.local < 0:
            raise TransportError(f"span {index} {span} needs offsets >= 0 and length >= 1")
        for side, end, nbytes in (
            ("remote", span.remote + span.length, remote_nbytes),
            ("local", span.local + span.length, local_nbytes),
        ):
            if end > nbytes:
                raise TransportError(f"span {index} {span} ends past the {side} arena ({nbytes} B)")


def check_pieces(
    pieces: Sequence[tuple[int, int]], region: int, *, sizes: Sequence[int], most: int
) -> None:
    """Check what a reader asks for: `pieces` (offset, length) of one of the owner's regions.

    `sizes` are those of all regions, `most` is that of a request, in bytes. Raises TransportError
    naming the first piece outside the region, an unknown region, or a request that is too big.
    """
    if region >= len(sizes):
        raise TransportError(f"there is no region {region}")
    for offset, length in pieces:
        if offset + length > sizes[region]:
            raise TransportError(f"{length} B at {offset} end past the arena ({sizes[region]} B)")
    total = sum(length for _, length in pieces)
    if total > most:
        raise TransportError(f"{total} B in one request are over {most} B")


def cut(spans: Sequence[SpanPair], most: int) -> Iterator[SpanPair]:
    """The same bytes in the same order, in spans of at most `most` bytes."""
    for remote, local, length in spans:
        for start in range(0, length, most):
            yield SpanPair(remote + start, local + start, min(most, length - start))


def gather(
    spans: Iterator[SpanPair], *, most_bytes: int, most_spans: int
) -> Iterator[list[SpanPair]]:
    """Lists of consecutive spans, as long as the two limits allow; no span is over `most_bytes`."""
    batch: list[SpanPair] = []
    room = most_bytes
    for span in spans:
        if span.length > room or len(batch) == most_spans:
            yield batch
            batch, room = [], most_bytes
        batch.append(span)
        room -= span.length
    if batch:
        yield batch
