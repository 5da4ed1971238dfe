"""Checks that a reader makes before a byte moves: the same on one host as on two."""

import pytest
import torch

from connector.transports.base import SpanPair, Transport
from engine.arena import ArenaMemory
from engine.errors import TransportError
from tests.support.network.reads import ODD_LENGTHS, StartPeer, expected, pull
from tests.support.network.transport_peer import ARENA_BYTES, ONCE_EACH, Peer

pytestmark = pytest.mark.parametrize("kind", ONCE_EACH, indirect=True)


def test_no_spans_is_done_at_once(peer: Peer, transport: Transport) -> None:
    transfer = transport.read("p", [])
    assert transfer.poll()
    transfer.wait(0)
    transfer.cancel()


def test_a_bad_span_is_named_and_nothing_is_written(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    for bad in (
        SpanPair(ARENA_BYTES - 10, 0, 11),
        SpanPair(0, ARENA_BYTES - 10, 11),
        SpanPair(-1, 0, 8),
        SpanPair(0, -1, 8),
        SpanPair(0, 0, 0),
        SpanPair(0, 0, -8),
    ):
        with pytest.raises(TransportError, match="span 1") as caught:
            transport.read("p", [SpanPair(0, 0, 100), bad])
        assert str(bad) in str(caught.value)
    assert not arena.tensor.any()


def test_an_unknown_peer_is_refused(start: StartPeer, transport: Transport) -> None:
    with pytest.raises(TransportError, match="'p' is not connected"):
        transport.read("p", [SpanPair(0, 0, 8)])
    transport.connect("p", start().address)
    transport.disconnect("p")
    transport.disconnect("p")
    with pytest.raises(TransportError, match="'p' is not connected"):
        transport.read("p", [SpanPair(0, 0, 8)])


def test_a_transport_has_one_arena(transport: Transport, arena: ArenaMemory) -> None:
    with pytest.raises(TransportError, match="one transport per arena"):
        transport.register(arena)


def test_a_garbage_address_is_a_typed_error(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    """A garbage address costs no connection that works."""
    for junk in (b"", b"\xff" * 64, b"\x80", bytes(200_000)):
        with pytest.raises(TransportError, match=r"Address|limit"):
            transport.connect("p", junk)
        arena.tensor.zero_()
        pull(transport, "p", ODD_LENGTHS)
        assert torch.equal(arena.tensor, expected(peer, ODD_LENGTHS))


def test_every_cut_address_is_a_typed_error(start: StartPeer, transport: Transport) -> None:
    address = start().address
    for length in range(0, len(address), 7):
        with pytest.raises(TransportError):
            transport.connect("p", address[:length])
