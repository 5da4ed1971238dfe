"""What every transport can do: move spans of bytes from a peer's arena into ours.

Knows bytes, spans and peers; not blocks, requests or leases. There is no `write`, `notify` or
`notices`: D reads and nobody pushes, and control messages travel on gRPC.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, TypeVar

import msgspec

from engine.arena import ArenaMemory
from engine.errors import TransportError

MAX_ADDRESS_BYTES = 128 * 1024
"""Longest address blob that is decoded; NIXL's metadata is about 0.5 KiB, more with many NICs."""

_Address = TypeVar("_Address", bound=msgspec.Struct)


class SpanPair(NamedTuple):
    """`length` bytes at `remote` in the peer's arena, wanted at `local` in ours; byte offsets."""

    remote: int
    local: int
    length: int


class TransferStatus(Enum):
    """State of a read that has not failed; failure is an exception."""

    PENDING = auto()
    DONE = auto()


class Transfer(ABC):
    """One read under way; it ends by DONE, by an error or by `cancel`."""

    @abstractmethod
    def poll(self) -> TransferStatus:
        """Progress without blocking. Raises TransportError after a failure or `cancel`."""

    @abstractmethod
    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        """Return once the first `nbytes` of all spans, in their order, are here; None: all.

        More may be. Raises TransferTimeoutError after `timeout_s` seconds, with the read cancelled,
        and TransportError when it failed.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Stop it and release its handles. Idempotent.

        Afterwards no late byte can reach the local arena.
        """


class CompletedTransfer(Transfer):
    """A read of no spans at all."""

    __slots__ = ()

    def poll(self) -> TransferStatus:
        return TransferStatus.DONE

    def wait(self, timeout_s: float, nbytes: int | None = None) -> None:
        """Return at once."""

    def cancel(self) -> None:
        """Nothing is under way."""


class Transport(ABC):
    """One-sided reads between one local arena and the arenas of connected peers.

    Methods may be called from several threads. Every failure is a TransportError.
    """

    name: str

    @abstractmethod
    def register(self, arena: ArenaMemory) -> None:
        """Make `arena` the local arena (one per transport), readable by peers."""

    @property
    @abstractmethod
    def address(self) -> bytes:
        """What peers `connect` to; another one after the arena had to be served anew.

        Raises TransportError before `register`.
        """

    def listens_at(self, address: bytes) -> str | None:
        """The IP address to which a peer's address leads.

        None where it leads to no host, or only a library can tell. Raises TransportError.
        """
        return None

    @abstractmethod
    def connect(self, peer: str, address: bytes) -> None:
        """Make `peer`'s arena readable.

        The same address again changes nothing; another one (the peer restarted) replaces the old
        one and drops its mapping. `address` is untrusted: raises TransportError.
        """

    @abstractmethod
    def read(self, peer: str, spans: Sequence[SpanPair]) -> Transfer:
        """Start copying `spans` from `peer`'s arena into ours.

        All spans are checked against both arenas before the first byte moves; the error names the
        span. Local spans must not overlap. Cancelling a pending read may fail the transport's other
        pending reads; connections come back with the next read.
        Few large spans are fast, so join neighbours first.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Drop the peer's mapping or agent; unknown peers are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back: transfers, mappings, registrations, handles. Idempotent."""


def check_spans(spans: Sequence[SpanPair], *, remote_nbytes: int, local_nbytes: int) -> None:
    """Raise TransportError naming the first span that is not inside both arenas."""
    for index, span in enumerate(spans):
        if span.length < 1 or span.remote < 0 or span.local < 0:
            raise TransportError(f"span {index} {span} needs offsets >= 0 and length >= 1")
        if span.remote + span.length > remote_nbytes:
            raise TransportError(
                f"span {index} {span} ends past the remote arena ({remote_nbytes} B)"
            )
        if span.local + span.length > local_nbytes:
            raise TransportError(
                f"span {index} {span} ends past the local arena ({local_nbytes} B)"
            )


def decode_address(address: bytes, kind: type[_Address]) -> _Address:
    """A peer's address, typed and length-limited. Raises TransportError naming what is wrong."""
    if len(address) > MAX_ADDRESS_BYTES:
        raise TransportError(
            f"address of {len(address)} B is over the limit of {MAX_ADDRESS_BYTES} B"
        )
    try:
        return msgspec.msgpack.decode(address, type=kind)
    except msgspec.DecodeError as error:
        raise TransportError(f"not a {kind.__name__} from a peer's register(): {error}") from error
