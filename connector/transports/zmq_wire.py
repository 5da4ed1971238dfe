"""The messages between the reader and the owner of memory over ZeroMQ, and their limits.

One request names pieces of one region; its answer is a header and one frame per piece.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from connector.transports.address import (
    Natural,
    PortNumber,
    RegionNumber,
    RegionSizes,
    decode_address,
)
from connector.transports.base import SpanPair, cut, gather
from engine.errors import TransportError

CHUNK_BYTES = 1 << 20
"""Most bytes that one request asks for."""
CHUNK_PIECES = 256
"""Most pieces that one request names."""
WINDOW = 8
"""Unanswered requests of one read: at most 8 MiB are on the way."""
HIGH_WATER = 2 * WINDOW + 2  # libzmq counts what was taken in steps of half the mark
MAX_REQUEST_BYTES = 8 * 1024
MAX_HEADER_BYTES = 1024
HANDSHAKE_S = 5.0
USER = b"tandem"

_Length = Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES)]
_Token = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ZmqAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="zmq"):
    """The socket of one incarnation of an owner; `token` opens its connections and no other's."""

    host: Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
    port: PortNumber
    nbytes: RegionSizes
    token: _Token


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """`pieces`: offset in the owner's region and length, in bytes."""

    number: Natural
    pieces: Annotated[
        tuple[tuple[Natural, _Length], ...], msgspec.Meta(min_length=1, max_length=CHUNK_PIECES)
    ]
    region: RegionNumber = 0


class AnswerHeader(msgspec.Struct, frozen=True, array_like=True):
    """Stands before the pieces; with a `refusal` none follow."""

    number: Natural
    refusal: Annotated[str, msgspec.Meta(max_length=MAX_HEADER_BYTES // 4)] = ""


def decode_zmq_address(blob: bytes) -> ZmqAddress:
    """A peer's address. Raises TransportError, also for a host that is no single IP address."""
    address = decode_address(blob, ZmqAddress)
    try:
        host = ipaddress.ip_address(address.host)
    except ValueError as error:
        raise TransportError(f"ZmqAddress needs an IP address as host: {error}") from error
    if host.is_multicast or host.is_unspecified:
        raise TransportError(f"ZmqAddress names no single host: {host}")
    return address


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's spelling of an IP address and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def chunks(spans: Sequence[SpanPair]) -> Iterator[list[SpanPair]]:
    """`spans` in order, cut and gathered into what one request may ask for."""
    return gather(cut(spans, CHUNK_BYTES), most_bytes=CHUNK_BYTES, most_spans=CHUNK_PIECES)
