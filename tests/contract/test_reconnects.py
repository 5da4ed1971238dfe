"""Connecting again and again to a peer that lives: neither side may hold more and more."""

import os

import pytest

from connector.transports.base import SpanPair
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from tests.leaks import Holdings, excess, held_by
from tests.transport_peer import ARENA_BYTES, DEADLINE_S, Peer

ROUNDS = 24
# NIXL gives the sockets of a connection back with its agent, which lasts for a few of them.
MAX_LEFT = {"nixl": Holdings({"fd socket:": 8})}


@pytest.mark.parametrize("kind", ["shm", "nixl", "ucx", "zmq"])
def test_reconnecting_holds_no_more_and_more(kind: str) -> None:
    peer, memory = Peer(kind, "p", seed=1), ArenaMemory(ARENA_BYTES)
    transport = open_transport(kind, "d")
    transport.register(memory)

    def reconnect(times: int) -> tuple[Holdings, Holdings]:
        for _ in range(times):
            transport.disconnect("p")
            transport.connect("p", peer.address)
            transport.read("p", [SpanPair(0, 0, ARENA_BYTES)]).wait(DEADLINE_S)
        return held_by(peer.pid), held_by(os.getpid())

    try:
        before = reconnect(2)
        after = reconnect(ROUNDS)
        for old, new in zip(before, after, strict=True):
            assert not excess(MAX_LEFT.get(kind, Holdings()), excess(old, new))
    finally:
        transport.close()
        memory.close()
        peer.stop()
