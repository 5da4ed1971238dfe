"""Reads from another host while the cable to it is pulled out, and plugged in again.

Behind test_transports.py also by name: a process whose first UCX is told to use TCP keeps to it.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from connector.transports.base import SpanPair, Transfer, Transport
from engine.arena import ArenaMemory
from engine.errors import TransferTimeoutError
from tests.support.network.reads import expected, pull, pull_in_the_end
from tests.support.network.transport_peer import (
    ARENA_BYTES,
    DEADLINE_S,
    MIB,
    TWO_HOSTS,
    Peer,
    Road,
    Wire,
)
from tests.tiers import everyday

pytestmark = pytest.mark.parametrize("kind", everyday(TWO_HOSTS, ("nixl-hosts",)), indirect=True)

WHOLE = [SpanPair(0, 0, ARENA_BYTES)]


@pytest.fixture
def wire(road: Road) -> Iterator[Wire]:
    """Whole again afterwards."""
    assert road.wire is not None
    yield road.wire
    road.wire.plug.set_link("up")
    road.wire.relay.go_on()


def read_up_to_a_pulled_cable(transport: Transport, peer: Peer, wire: Wire) -> Transfer:
    """A read that has some of its bytes; the rest cannot come."""
    pull(transport, "p", [SpanPair(0, 0, 8)])
    wire.relay.hold_behind(MIB)
    transfer = transport.read("p", WHOLE)
    deadline = time.monotonic() + DEADLINE_S
    while not wire.relay.holds():
        assert not transfer.poll()
        assert time.monotonic() < deadline
    wire.plug.set_link("down")
    wire.relay.go_on()
    return transfer


def test_every_byte_crosses_the_cable(
    peer: Peer, transport: Transport, arena: ArenaMemory, wire: Wire
) -> None:
    before = wire.relay.count_passed()
    pull(transport, "p", WHOLE)
    assert wire.relay.count_passed() - before >= ARENA_BYTES
    assert torch.equal(arena.tensor, peer.bytes)


def test_a_read_outlives_a_cable_that_was_out_for_a_moment(
    peer: Peer, transport: Transport, arena: ArenaMemory, wire: Wire
) -> None:
    transfer = read_up_to_a_pulled_cable(transport, peer, wire)
    time.sleep(0.3)
    wire.plug.set_link("up")
    transfer.wait(DEADLINE_S)
    assert torch.equal(arena.tensor, peer.bytes)


def test_a_read_gives_up_on_a_pulled_cable_and_a_later_one_arrives(
    peer: Peer, transport: Transport, arena: ArenaMemory, wire: Wire
) -> None:
    transfer = read_up_to_a_pulled_cable(transport, peer, wire)
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.3)
    arena.tensor.zero_()
    wire.plug.set_link("up")
    spans = [SpanPair(MIB, 0, 64)]  # after everything that the peer still had to send
    pull_in_the_end(transport, peer, spans)
    assert torch.equal(arena.tensor, expected(peer, spans))
