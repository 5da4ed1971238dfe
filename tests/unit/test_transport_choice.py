"""Which transport a node opens, by name and by `auto`."""

from contextlib import ExitStack, closing

import msgspec
import pytest
import structlog

from connector.pd.config import PdConnectorConfig
from connector.transports.base import SpanPair
from connector.transports.choose import (
    TRANSPORTS,
    choose_transport,
    is_installed,
    open_transport,
)
from connector.transports.near_and_far import NearAndFar, NearAndFarAddress
from connector.transports.shm import ShmAddress, ShmTransport
from connector.transports.zmq import ZmqTransport
from engine.arena import ArenaMemory
from engine.config import decode_config
from engine.errors import ConfigError, TransportError
from engine.rpc.address import is_loopback

LOOPBACK = "127.0.0.1"


def test_auto_and_unknown_names() -> None:
    assert open_transport("auto", "d").name == "shm"
    with closing(open_transport("auto", "d", same_host=False)) as both:
        assert both.name == "shm+nixl"
    with pytest.raises(ConfigError, match="unknown transport 'smoke'"):
        open_transport("smoke", "d")


def test_auto_across_hosts_takes_the_first_that_is_installed_and_says_why() -> None:
    name, reason = choose_transport(same_host=False, is_installed=lambda package: True)
    assert name == "nixl"
    assert reason.startswith("peers may be on other hosts")
    name, reason = choose_transport(same_host=False, is_installed=lambda package: False)
    assert name == "zmq"
    assert "nixl is not installed (pip install '.[nixl]' in a checkout of Tandem)" in reason
    assert choose_transport(same_host=True, is_installed=lambda package: False)[0] == "shm"


def test_an_arena_on_a_device_is_served_by_what_can_reach_it() -> None:
    for same_host in (True, False):
        with closing(open_transport("auto", "d", same_host=same_host, on_device=True)) as chosen:
            assert chosen.name == "nixl"
    name, _ = choose_transport(
        same_host=True, on_device=True, is_installed=lambda package: package != "nixl"
    )
    assert name == "zmq"
    for name in ("shm", "ucx"):
        with pytest.raises(ConfigError, match=rf"{name} serves no arena on a device.*nixl.*zmq"):
            open_transport(name, "d", on_device=True)


@pytest.mark.parametrize(
    ("change", "transport"),
    [({}, "shm"), ({"host": "another/pid:[1]"}, "zmq"), ({"pid": 2**31 - 1}, "zmq")],
    ids=["here", "elsewhere", "here, but out of reach"],
)
def test_where_a_peer_runs_decides_and_not_its_address(
    change: dict[str, object], transport: str
) -> None:
    with ExitStack() as stack:
        sides = [NearAndFar(ShmTransport(name), ZmqTransport(name, LOOPBACK)) for name in "pd"]
        arenas = [ArenaMemory(4096) for _ in sides]
        for side, arena in zip(sides, arenas, strict=True):
            stack.callback(arena.close)
            stack.callback(side.close)
            side.register(arena)
        arenas[0].tensor.fill_(7)
        told = msgspec.msgpack.decode(sides[0].address, type=NearAndFarAddress)
        near = msgspec.msgpack.decode(told.near, type=ShmAddress)
        near = msgspec.structs.replace(near, **change)
        told = msgspec.structs.replace(told, near=msgspec.msgpack.encode(near))
        with structlog.testing.capture_logs() as logs:
            sides[1].connect("p", msgspec.msgpack.encode(told))
        assert [log["transport"] for log in logs if "is read" in log["event"]] == [transport]
        sides[1].read("p", [SpanPair(0, 0, 4096)]).wait(10.0)
        assert bool((arenas[1].tensor == 7).all())
        sides[1].disconnect("p")
        with pytest.raises(TransportError, match="not connected"):
            sides[1].read("p", [SpanPair(0, 0, 4096)])


def test_packages_are_looked_for_without_an_import() -> None:
    assert is_installed("zmq")
    assert not is_installed("no_such_package_of_ours")
    assert all(is_transport_option(name) for name in TRANSPORTS)
    assert not is_transport_option("smoke")


def is_transport_option(name: str) -> bool:
    try:
        decode_config({"transport": name}, PdConnectorConfig, "flags")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True),
        ("10.0.0.5", False), ("fe80::1", False), ("node-7", False), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_only_a_loopback_host_means_that_all_peers_are_here(host: str, here: bool) -> None:
    assert is_loopback(host) is here
