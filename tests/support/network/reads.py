"""The reads of the transport tests: patterns, expected bytes, and waiting."""

import time
from collections.abc import Callable, Sequence

import torch

from connector.transports.base import SpanPair, Transport
from engine.errors import TransportError
from tests.support.network.transport_peer import ARENA_BYTES, DEADLINE_S, MIB, Peer

StartPeer = Callable[..., Peer]
RETRY_S = 0.05
ODD_LENGTHS = [
    SpanPair(3, 5, 1),
    SpanPair(4097, 1, 4),
    SpanPair(8191, 4096, 4095),
    SpanPair(65_537, 12_289, 4097),
    SpanPair(MIB + 1, 2 * MIB - 1, MIB + 3),
    SpanPair(ARENA_BYTES - 7, ARENA_BYTES - 7, 7),
]


def permuted_blocks(count: int = 64, size: int = 12_288) -> list[SpanPair]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    return [SpanPair(source * size, target * size, size) for target, source in enumerate(order)]


def pull(transport: Transport, peer: str, spans: Sequence[SpanPair]) -> None:
    transport.read(peer, spans).wait(DEADLINE_S)


def expected(peer: Peer, spans: Sequence[SpanPair]) -> torch.Tensor:
    wanted = torch.zeros(ARENA_BYTES, dtype=torch.uint8)
    for remote, local, length in spans:
        wanted[local : local + length] = peer.bytes[remote : remote + length]
    return wanted


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pull_in_the_end(transport: Transport, peer: Peer, spans: Sequence[SpanPair]) -> None:
    """Reads until one succeeds: earlier faults may cost reads or the peer's address, not a byte."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        transport.connect("p", peer.address_now())
        try:
            transport.read("p", spans).wait(1.0)
        except TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return
