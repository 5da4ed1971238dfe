"""Connecting again and again to a peer that lives: neither side may hold more and more."""

import os

import pytest

from connector.transports.base import SpanPair
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from tests.support.network.reads import pull, until
from tests.support.network.transport_peer import ARENA_BYTES, ONCE_EACH, Peer
from tests.support.nodes.leaks import Holdings, excess, held_by

ROUNDS = 24
# NIXL gives the sockets of a connection back with its agent, which lasts for a few of them.
MAX_LEFT = {"nixl": Holdings({"fd socket:": 8})}


@pytest.mark.parametrize("kind", ONCE_EACH)
def test_reconnecting_holds_no_more_and_more(kind: str) -> None:
    peer, memory = Peer(kind, "p", seed=1), ArenaMemory(ARENA_BYTES)
    transport = open_transport(kind, "d")
    transport.register(memory)

    def reconnect(times: int) -> None:
        for _ in range(times):
            transport.disconnect("p")
            transport.connect("p", peer.address)
            pull(transport, "p", [SpanPair(0, 0, ARENA_BYTES)])

    def num_more(before: Holdings, pid: int) -> int:
        return excess(MAX_LEFT.get(kind, Holdings()), excess(before, held_by(pid))).total()

    try:
        reconnect(2)
        before = {pid: held_by(pid) for pid in (peer.pid, os.getpid())}
        reconnect(ROUNDS)
        for pid, held in before.items():  # a peer takes a moment to see that one has gone
            until(lambda: not num_more(held, pid))  # noqa: B023 - called at once
    finally:
        transport.close()
        memory.close()
        peer.stop()
