"""Addresses of nodes' memory: typed, bounded, and decoded without trust. Imports no torch."""

from typing import Annotated, Final, TypeVar

import msgspec

from engine.errors import TransportError
from engine.struct_types import learned

MAX_ADDRESS_BYTES = 128 * 1024
"""Longest address that is decoded; NIXL's metadata is about 0.5 KiB, more with many NICs."""
MAX_REGIONS = 8
AUTO: Final = "auto"
"""The transport of a node that finds out for each peer which one reaches it."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nbytes = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
PortNumber = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
RegionNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_REGIONS)]
PerRegion = msgspec.Meta(min_length=1, max_length=MAX_REGIONS)
RegionSizes = Annotated[tuple[Nbytes, ...], PerRegion]
"""Bytes of each region, in the order of `Transport.register`."""

_Address = TypeVar("_Address", bound=msgspec.Struct)


def decode_address(address: bytes, kind: type[_Address]) -> _Address:
    """A peer's address, typed and length-limited. Raises TransportError naming what is wrong."""
    if len(address) > MAX_ADDRESS_BYTES:
        raise TransportError(
            f"address of {len(address)} B is over the limit of {MAX_ADDRESS_BYTES} B"
        )
    try:
        return msgspec.msgpack.decode(address, type=learned(kind))
    except msgspec.DecodeError as error:
        raise TransportError(f"not a {kind.__name__} from a peer's register(): {error}") from error
