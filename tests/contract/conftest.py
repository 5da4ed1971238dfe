"""The transport under test, its peers, and the host on which they live: this one or another."""

import ipaddress
import os
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from connector.transports.base import Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.distribution import how_to_install
from tests.support.network.netns import End, cable, namespaces, obstacle, skip_if_impossible
from tests.support.network.reads import StartPeer
from tests.support.network.relay import Relay
from tests.support.network.transport_peer import (
    ARENA_BYTES,
    KINDS,
    LOCAL,
    ONCE_EACH,
    SECOND_BYTES,
    TWO_HOSTS,
    Peer,
    Place,
    Road,
    Wire,
)
from tests.tiers import everyday

BENCHMARKS = ipaddress.ip_network("198.18.0.0/15")  # RFC 2544: on no real network


@pytest.fixture(params=everyday(KINDS, ONCE_EACH))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, network = request.param.partition("-")
    if name == "nixl":
        pytest.importorskip("nixl", reason=f"nixl is not installed: {how_to_install('nixl')}")
    if name == "ucx" and find_spec("ucxx") is None:
        pytest.skip(f"ucxx is not installed: {how_to_install('ucx')}")
    if network:
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return str(name)


@pytest.fixture
def road(
    kind: str,
    far_host: Road | None,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Road:
    """From here to the peers; to those on another host only the cable leads."""
    if request.node.callspec.params["kind"] not in TWO_HOSTS:
        return LOCAL
    if far_host is None:
        skip_if_impossible()
    assert far_host is not None and far_host.wire is not None
    monkeypatch.setenv("UCX_NET_DEVICES", far_host.wire.plug.device)
    return far_host


@pytest.fixture
def start(kind: str, road: Road) -> Iterator[StartPeer]:
    peers: list[Peer] = []

    def start_peer(name: str = "p", seed: int = 1) -> Peer:
        peers.append(Peer(kind, name, seed, place=road.far))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.stop()


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    memory = ArenaMemory(ARENA_BYTES)
    yield memory
    memory.close()


@pytest.fixture
def second() -> Iterator[ArenaMemory]:
    memory = ArenaMemory(SECOND_BYTES)
    yield memory
    memory.close()


@pytest.fixture
def transport(
    kind: str, road: Road, arena: ArenaMemory, second: ArenaMemory
) -> Iterator[Transport]:
    opened = open_transport(kind, "d", host=road.near.address)
    opened.register(arena, second)
    yield opened
    opened.close()


@pytest.fixture
def peer(start: StartPeer, transport: Transport) -> Peer:
    """One peer, `p`, that the transport is connected to."""
    opened = start()
    transport.connect("p", opened.address)
    return opened


@pytest.fixture(scope="session", autouse=True)
def far_host() -> Iterator[Road | None]:
    """Behind two cables and a switch: this process stays where it is, its peers live over there.

    None where that is impossible. Up before any other test: UCX reads the routes once per process.
    """
    if obstacle():
        yield None
        return
    pid = os.getpid()
    switch, name, device = f"tandem-far-switch-{pid}", f"tandem-far-{pid}", f"far{pid}"
    near, far = End(device, None), End(device, name)
    ports = End("near", switch), End("far", switch)
    here, there = _addresses(pid)
    with ExitStack() as stack:
        stack.enter_context(namespaces(switch, name))
        for end, port, address in zip((near, far), ports, (here, there), strict=True):
            stack.enter_context(cable(end, port))
            port.set_up()
            end.set_up(f"{address}/30")
        relay = Relay(switch, near="near", far="far")
        stack.callback(relay.stop)
        yield Road(Place(here), Place(there, name), Wire(far, relay))


def _addresses(number: int) -> tuple[str, str]:
    """Of both ends; another test run on this machine has others."""
    first = int(BENCHMARKS.network_address) + 4 * number % BENCHMARKS.num_addresses
    return str(ipaddress.ip_address(first + 1)), str(ipaddress.ip_address(first + 2))
