"""Two transports as one: shared memory for peers on this host, another one for those elsewhere.

The place where a peer runs decides, not the address by which it is reached.
"""

from collections.abc import Sequence

import msgspec
import structlog

from connector.transports.address import decode_address
from connector.transports.base import SpanPair, Transfer, Transport
from connector.transports.shm import ShmAddress, ShmTransport
from engine.arena import ArenaMemory
from engine.errors import TransportError

log = structlog.get_logger()

BOTH = "+"


class NearAndFarAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="near and far"):
    """Two addresses of the same memory: by shared memory and by the other transport."""

    near: bytes
    far: bytes


class NearAndFar(Transport):
    """Owner of both transports. Only nodes with the same two are peers, as `name` says both."""

    def __init__(self, near: ShmTransport, far: Transport) -> None:
        self.name = f"{near.name}{BOTH}{far.name}"
        self._near = near
        self._far = far
        self._by_peer: dict[str, Transport] = {}

    def register(self, *regions: ArenaMemory) -> None:
        self._near.register(*regions)
        self._far.register(*regions)

    @property
    def address(self) -> bytes:
        both = NearAndFarAddress(near=self._near.address, far=self._far.address)
        return msgspec.msgpack.encode(both)

    def listens_at(self, address: bytes) -> str | None:
        return self._far.listens_at(decode_address(address, NearAndFarAddress).far)

    def connect(self, peer: str, address: bytes) -> None:
        both = decode_address(address, NearAndFarAddress)
        chosen: Transport = self._near
        reason: str | None = None
        try:
            self._near.connect(peer, both.near)
        except TransportError as error:
            # One host is not enough to share memory: the peer may run as another user, say.
            chosen, reason = self._far, str(error)
            self._far.connect(peer, both.far)
        log.info("a peer is read", peer=peer, transport=chosen.name, reason=reason)
        before = self._by_peer.get(peer)
        self._by_peer[peer] = chosen
        if before not in (None, chosen):
            before.disconnect(peer)

    def read(self, peer: str, spans: Sequence[SpanPair], region: int = 0) -> Transfer:
        transport = self._by_peer.get(peer)
        if transport is None:
            raise TransportError(f"peer {peer!r} is not connected")
        return transport.read(peer, spans, region)

    def disconnect(self, peer: str) -> None:
        transport = self._by_peer.pop(peer, None)
        if transport is not None:
            transport.disconnect(peer)

    def close(self) -> None:
        self._by_peer.clear()
        self._near.close()
        self._far.close()


def host_behind(name: str, address: bytes) -> str | None:
    """The host of a node with transport `name` and this address; None: the address does not tell.

    `why_out_of_reach` compares two of them. Raises TransportError for anything but an address.
    """
    near, _, far = name.partition(BOTH)
    if near != ShmTransport.name:
        return None
    whole = decode_address(address, NearAndFarAddress).near if far else address
    return decode_address(whole, ShmAddress).host
