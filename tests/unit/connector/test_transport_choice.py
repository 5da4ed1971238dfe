"""Which transport a node opens, by name and by `auto`."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from os import getpid
from typing import Any, NoReturn

import msgspec
import pytest
import structlog

from connector.pd.config import PdConnectorConfig
from connector.transports.auto import AutoAddress, AutoTransport
from connector.transports.base import SpanPair
from connector.transports.choose import TRANSPORTS, choose_transports, is_installed, open_transport
from connector.transports.shm import ShmAddress
from connector.transports.zmq import ZmqTransport
from connector.transports.zmq_owner import ZmqAddress
from engine.arena import ArenaMemory
from engine.errors import ConfigError, OutOfReachError, TransportError
from serving.config import decode_config
from serving.rpc.address import is_loopback
from tests.support.network.netns import End, cable, enter, namespaces, skip_if_impossible

FIRST, SECOND = "10.78.7.5", "10.78.7.6"
LOOPBACK = "127.0.0.1"
WAIT_S = 20.0


def test_auto_and_unknown_names() -> None:
    for same_host in (True, False):
        with closing(open_transport("auto", "d", same_host=same_host)) as chosen:
            assert chosen.name == "auto"
    with pytest.raises(ConfigError, match="unknown transport 'smoke'"):
        open_transport("smoke", "d")


def test_auto_takes_those_that_are_installed_in_order_and_says_why() -> None:
    names, reason = choose_transports(is_installed=lambda package: True)
    assert names == ("shm", "nixl", "ucx", "zmq")
    assert reason.startswith("shm for peers that can share memory")
    names, reason = choose_transports(is_installed=lambda package: False)
    assert names == ("shm", "zmq")
    assert "nixl is not installed (pip install '.[nixl]' in a checkout of Tandem)" in reason


def test_an_arena_on_a_device_is_served_by_what_can_reach_it() -> None:
    for same_host in (True, False):
        with closing(open_transport("auto", "d", same_host=same_host, on_device=True)) as chosen:
            assert chosen.name == "auto"
    names, reason = choose_transports(on_device=True, is_installed=lambda package: True)
    assert names == ("cuda_ipc", "nixl", "zmq")
    assert reason.startswith("cuda_ipc for peers that can share a device's memory")
    names, _ = choose_transports(on_device=True, is_installed=lambda package: package != "nixl")
    assert names == ("cuda_ipc", "zmq")
    for name in ("shm", "ucx"):
        with pytest.raises(ConfigError, match=rf"{name} serves no arena on a device.*nixl.*zmq"):
            open_transport(name, "d", on_device=True)
    with pytest.raises(ConfigError, match="cuda_ipc serves arenas on devices only"):
        open_transport("cuda_ipc", "d")


@dataclass(slots=True)
class Side:
    """A node with transports for auto, and an arena of one page."""

    transport: AutoTransport
    arena: ArenaMemory

    @property
    def told(self) -> AutoAddress:
        return msgspec.msgpack.decode(self.transport.address, type=AutoAddress)

    def finds(self, byte: int, peer: str) -> bool:
        self.transport.read(peer, [SpanPair(0, 0, 4096)]).wait(WAIT_S)
        return bool((self.arena.tensor == byte).all())


@pytest.fixture
def side() -> Iterator[Callable[..., Side]]:
    with ExitStack() as stack:

        def make(*names: str, at_start: int = 1, byte: int = 0, host: str = LOOPBACK) -> Side:
            kinds = {name: TRANSPORTS[name] for name in names}
            arena = stack.enter_context(closing(ArenaMemory(4096)))
            arena.tensor.fill_(byte)
            auto = AutoTransport(f"node-{byte}", host, kinds, at_start=at_start)
            stack.enter_context(closing(auto)).register(arena)
            return Side(auto, arena)

        yield make


def changed(told: AutoAddress, near: dict[str, object], **change: object) -> bytes:
    """An address in which some of the shm part, and of the whole, are not true."""
    shm = msgspec.msgpack.decode(told.ways["shm"], type=ShmAddress)
    ways = told.ways | {"shm": msgspec.msgpack.encode(msgspec.structs.replace(shm, **near))}
    return msgspec.msgpack.encode(msgspec.structs.replace(told, **({"ways": ways} | change)))


@pytest.mark.parametrize(
    ("near", "transport"),
    [({}, "shm"), ({"host": "another/pid:[1]"}, "zmq"), ({"pid": 2**31 - 1}, "zmq")],
    ids=["here", "elsewhere", "here, but out of reach"],
)
def test_what_reaches_a_peer_is_found_out_and_opened_when_it_is_needed(
    side: Callable[..., Side], near: dict[str, object], transport: str
) -> None:
    p, d = side("shm", "zmq", byte=7), side("shm", "ucx", "zmq")
    assert p.told.offered == ("shm", "zmq")
    assert list(p.told.ways) == list(d.told.ways) == ["shm"]
    with structlog.testing.capture_logs() as logs:
        if near:
            # As the handshake does: D says what would do, P serves by it, D tries again.
            with pytest.raises(OutOfReachError, match="shm: cannot map") as failed:
                d.transport.connect("p", changed(p.told, near))
            assert failed.value.left == ("zmq",)
            p.transport.offer(failed.value.left)
            p.transport.offer(failed.value.left)
            assert list(p.told.ways) == ["shm", "zmq"]
        d.transport.connect("p", changed(p.told, near))
    assert [log["transport"] for log in logs if "is read" in log["event"]] == [transport]
    assert d.finds(7, "p")
    d.transport.connect("p", changed(p.told, near))
    d.transport.disconnect("p")
    with pytest.raises(TransportError, match="not connected"):
        d.transport.read("p", [SpanPair(0, 0, 4096)])


def test_a_peer_that_restarted_is_read_by_what_reaches_it_now(side: Callable[..., Side]) -> None:
    d = side("shm", "zmq")
    for byte, pid in ((1, None), (2, 2**31 - 1), (3, None)):
        p = side("shm", "zmq", at_start=2, byte=byte)
        d.transport.connect("p", changed(p.told, {"pid": pid} if pid else {}))
        assert d.finds(byte, "p")


def test_memory_in_which_the_nonce_is_not_found_is_not_read(side: Callable[..., Side]) -> None:
    """Such as that of another node, or of a life of this one that has ended."""
    p, other, d = (side("shm", "zmq", at_start=2, byte=byte) for byte in (1, 2, 3))
    replayed = changed(p.told, {}, ways=other.told.ways)
    with pytest.raises(OutOfReachError, match=r"not what the peer has told.*not what") as failed:
        d.transport.connect("p", replayed)
    assert failed.value.left == ()
    with pytest.raises(TransportError, match="not connected"):
        d.transport.read("p", [SpanPair(0, 0, 4096)])
    # One way that is not its own does not keep the peer from being read by another.
    mixed = p.told.ways | {"shm": other.told.ways["shm"]}
    d.transport.connect("p", changed(p.told, {}, ways=mixed))
    assert d.finds(1, "p")
    # The region that has the nonce is not for pulls.
    with pytest.raises(TransportError, match="do not both have"):
        d.transport.read("p", [SpanPair(0, 0, 32)], 1)


def test_a_way_that_does_not_answer_is_left_in_time(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connector.transports.auto.PROBE_S", 0.2)
    p, d = side("shm", "zmq", at_start=2), side("shm", "zmq")
    with socket.create_server((LOOPBACK, 0)) as silent:
        zmq = msgspec.msgpack.decode(p.told.ways["zmq"], type=ZmqAddress)
        zmq = msgspec.structs.replace(zmq, port=silent.getsockname()[1])
        ways = {"zmq": msgspec.msgpack.encode(zmq)}
        address = msgspec.msgpack.encode(msgspec.structs.replace(p.told, ways=ways))
        with pytest.raises(OutOfReachError, match=r"zmq: read from .* not done after 0\.2 s"):
            d.transport.connect("p", address)


def test_what_cannot_be_opened_is_left_out(side: Callable[..., Side]) -> None:
    class Broken(ZmqTransport):
        def _serve(self) -> NoReturn:
            raise TransportError("no such card")

    with closing(ArenaMemory(4096)) as arena:
        kinds: dict[str, Any] = {"nixl": Broken, "shm": TRANSPORTS["shm"]}
        with closing(AutoTransport("p", LOOPBACK, kinds, at_start=2)) as auto:
            auto.register(arena)
            told = Side(auto, arena).told
            assert told.offered == tuple(told.ways) == ("shm",)
        with pytest.raises(TransportError, match="none of the transports could be opened"):
            AutoTransport("p", LOOPBACK, {"nixl": Broken}, at_start=1).register(arena)


@pytest.fixture
def two_addresses() -> Iterator[Executor]:
    """Runs what it gets in a host whose one network device has `FIRST` and `SECOND`."""
    skip_if_impossible()
    names = [f"tandem-{letter}-{getpid()}" for letter in "ab"]
    end, far = (End("cable", name) for name in names)
    with ExitStack() as stack:
        stack.enter_context(namespaces(*names))
        stack.enter_context(cable(end, far))
        far.set_up()
        for address in (FIRST, SECOND):
            end.set_up(f"{address}/24")
        yield stack.enter_context(ThreadPoolExecutor(1, initializer=partial(enter, names[0])))


def test_what_cannot_listen_at_an_interfaces_second_address_is_left_out(
    side: Callable[..., Side], two_addresses: Executor
) -> None:
    """UCX knows interfaces, not addresses: it would listen at the first one, which nobody chose."""
    others = [name for name in ("nixl", "ucx") if is_installed(str(TRANSPORTS[name].package))]
    both = [partial(side, *others, "zmq", byte=byte, host=SECOND) for byte in (7, 0)]
    with structlog.testing.capture_logs() as logs:
        p, d = (two_addresses.submit(make).result() for make in both)
        two_addresses.submit(d.transport.connect, "p", p.transport.address).result()
    assert d.finds(7, "p")
    left = [log for log in logs if log["event"] == "transport_not_available"]
    assert [log["transport"] for log in left] == [*others, *others]
    assert all(f"{SECOND} ({SECOND}) as its first" in log["error"] for log in left)
    assert [log["transport"] for log in logs if "is read" in log["event"]] == ["zmq"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ways": {}}, "length >= 1"),
        ({"ways": {str(number): b"" for number in range(9)}}, "length <= 8"),
        ({"nonce": b"short"}, "length >= 32"),
        ({"ways": {"x" * 21: b""}}, "length <= 20"),
    ],
)
def test_what_a_peer_says_of_its_ways_is_bounded(
    side: Callable[..., Side], change: dict[str, object], said: str
) -> None:
    d = side("shm")
    with pytest.raises(TransportError, match=f"not a AutoAddress.*{said}"):
        d.transport.connect("p", changed(d.told, {}, **change))


def test_a_peer_names_one_host_for_its_memory(side: Callable[..., Side]) -> None:
    kinds = dict.fromkeys(("a", "b"), ZmqTransport)
    auto = AutoTransport("d", LOOPBACK, kinds, at_start=1)
    for hosts in (("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")):
        named = [ZmqAddress(host, 1, (1,), "0" * 64) for host in hosts]
        ways = {name: msgspec.msgpack.encode(it) for name, it in zip("ab", named, strict=True)}
        address = msgspec.msgpack.encode(
            AutoAddress(offered=("a", "b"), ways=ways, nonce=bytes(32))
        )
        if len(set(hosts)) == 1:
            assert auto.listens_at(address) == LOOPBACK
        else:
            with pytest.raises(TransportError, match="memory is at"):
                auto.listens_at(address)


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
