"""Handshakes with one incarnation share a mapping: the last use of it closes it, no earlier one."""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from connector.pd.decode.peer_registry import Peer, PeerRegistry
from connector.transports.base import SpanPair
from engine.errors import TransportError
from serving.node.server import NodeServer
from tests.e2e.test_handshakes import registry_of
from tests.support.nodes.accounts import identity_of
from tests.support.nodes.cluster import Cluster, until


async def test_an_old_use_that_ends_while_the_next_handshake_connects_leaves_it_the_mapping(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await cluster.start("prefill", model)
    connected, go = threading.Event(), threading.Event()
    async with AsyncExitStack() as stack:
        registry = registry_of(stack, identity_of(p), 0)
        first = await met(registry, p)
        connect = registry._transport.connect

        def slowly(peer: str, address: bytes) -> None:
            connect(peer, address)
            connected.set()
            assert go.wait(20)

        monkeypatch.setattr(registry._transport, "connect", slowly)
        registry.forget(first)
        meeting = asyncio.create_task(met(registry, p))
        assert await asyncio.to_thread(connected.wait, 20)
        registry.release(first)
        await asyncio.sleep(0.2)  # it may have to wait for the handshake
        go.set()
        second = await meeting
        assert is_read(registry, second)
        registry.release(second)


async def test_the_last_use_of_a_mapping_closes_it_in_whatever_order(
    cluster: Cluster, model: Path
) -> None:
    p = await cluster.start("prefill", model)
    async with AsyncExitStack() as stack:
        registry = registry_of(stack, identity_of(p), 0)
        first = await met(registry, p)
        registry.forget(first)
        second = await met(registry, p)
        registry.forget(second)
        registry.release(second)
        assert is_read(registry, first)
        registry.release(first)
        await until(lambda: not is_read(registry, first))


async def met(registry: PeerRegistry, p: NodeServer) -> Peer:
    """A use of P, with a handshake if it is not known."""
    return await registry.acquire("127.0.0.1", p.rpc.port, p.engine_id)


def is_read(registry: PeerRegistry, peer: Peer) -> bool:
    """Whether its memory can be read; False if it is not connected."""
    try:
        registry._transport.read(peer.link, [SpanPair(0, 0, 64)]).wait(20)
    except TransportError:
        return False
    return True
