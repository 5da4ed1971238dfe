"""Reads between two arenas on a device, whose driver is played by memfds: all but CUDA's calls."""

import multiprocessing
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

from connector.transports.arena_transport import ArenaTransport
from connector.transports.auto import AutoTransport, host_behind
from connector.transports.base import SpanPair
from connector.transports.cuda_ipc import CudaIpcAddress, CudaIpcTransfer
from connector.transports.cuda_memory import LIBRARY, CudaMemory, DeviceRegion
from connector.transports.shm import this_host
from connector.transports.zmq import ZmqTransport
from engine.arena import ArenaMemory
from engine.errors import OutOfReachError, TransferTimeoutError, TransportError
from tests.support.nodes.forks import forks
from tests.support.nodes.stream_arena import Device, SharedIpc, SharedMemory, StreamArena

NBYTES, RECORDS = 64 << 10, 4096
WAIT_S = 20.0
SPANS = [SpanPair(100, 0, 7), SpanPair(8192, 4096, 4096), SpanPair(0, 8192, 64), SpanPair(64, 7, 1)]


class Node:
    """An arena on a device, records on the host, and the transport that has registered both."""

    def __init__(self, device: Device, stack: ExitStack, seed: int) -> None:
        self.arena = stack.enter_context(closing(StreamArena(NBYTES, device)))
        self.records = stack.enter_context(closing(ArenaMemory(RECORDS)))
        self.content = random.Random(seed).randbytes(NBYTES)
        self.arena.bytes_now(0, NBYTES)[:] = self.content
        self.records.tensor.fill_(seed)
        self.ipc = stack.enter_context(closing(SharedIpc(f"node-{seed}")))
        self.ipc.register(self.arena, self.records)

    def now(self, offset: int, length: int) -> bytes:
        return bytes(self.arena.bytes_now(offset, length))


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with ExitStack() as stack:
        device = Device(seed=1)
        yield Node(device, stack, 1), Node(device, stack, 2)
    assert SharedMemory.num_open == 0


def test_exactly_the_named_bytes_arrive(nodes: tuple[Node, Node]) -> None:
    p, d = nodes
    d.ipc.connect("p", p.ipc.address)
    expected = bytearray(d.content)
    for remote, local, length in SPANS:
        expected[local : local + length] = p.content[remote : remote + length]
    d.ipc.read("p", SPANS).wait(WAIT_S)
    assert d.now(0, NBYTES) == bytes(expected)
    assert p.now(0, NBYTES) == p.content


def test_records_are_read_in_host_memory(nodes: tuple[Node, Node]) -> None:
    p, d = nodes
    d.ipc.connect("p", p.ipc.address)
    d.ipc.read("p", [SpanPair(8, 16, 8)], 1).wait(WAIT_S)
    assert bytes(d.records.read(8, 24)) == b"\2" * 8 + b"\1" * 8 + b"\2" * 8
    with pytest.raises(TransportError, match=r"span 0 .* ends past the remote arena"):
        d.ipc.read("p", [SpanPair(NBYTES, 0, 1)])


def test_bytes_are_here_when_the_device_says_so(nodes: tuple[Node, Node]) -> None:
    p, d = nodes
    d.ipc.connect("p", p.ipc.address)
    gate = d.arena.engine.record()  # comes last of all, so the copy cannot begin
    d.arena.side.wait_event(gate)
    p.arena.gpu.streams.remove(d.arena.engine)
    transfer = d.ipc.read("p", SPANS)
    assert not transfer.poll()
    with pytest.raises(AssertionError, match="cannot come"):
        transfer.cancel()  # it would wait for ever, as no late byte may come
    p.arena.gpu.streams.append(d.arena.engine)
    transfer.wait(WAIT_S, 1)
    assert transfer.poll()
    assert d.now(4096, 4096) == p.content[8192 : 8192 + 4096]


def test_after_a_cancel_no_byte_comes(nodes: tuple[Node, Node]) -> None:
    p, d = nodes
    d.ipc.connect("p", p.ipc.address)
    transfer = d.ipc.read("p", SPANS)
    transfer.cancel()
    transfer.cancel()
    d.arena.bytes_now(0, NBYTES)[:] = bytes(NBYTES)
    d.arena.side.record().synchronize()
    assert d.now(0, NBYTES) == bytes(NBYTES)
    with pytest.raises(TransportError, match="cancelled"):
        transfer.poll()


def test_a_read_that_takes_too_long_has_ended_when_that_is_said(nodes: tuple[Node, Node]) -> None:
    p, d = nodes
    d.ipc.connect("p", p.ipc.address)
    with pytest.raises(TransferTimeoutError):
        d.ipc.read("p", SPANS * 40).wait(0.0)
    assert not d.arena.side.queue


@pytest.mark.parametrize("end", ["disconnect", "reconnect", "close"])
def test_memory_is_unmapped_after_the_last_copy(nodes: tuple[Node, Node], end: str) -> None:
    p, d = nodes
    d.ipc.connect("p", p.ipc.address)
    assert SharedMemory.num_open == 1
    transfer = d.ipc.read("p", SPANS)
    if end == "disconnect":
        d.ipc.disconnect("p")
    elif end == "reconnect":
        d.ipc.connect("p", changed(p, grow=1))
    else:
        d.ipc.close()
    assert not d.arena.side.queue
    assert SharedMemory.num_open == (end == "reconnect")
    with pytest.raises(TransportError):
        transfer.poll()


def changed(node: Node, *, grow: int = 0, device: str | None = None, **change: object) -> bytes:
    """The address of a node, of which some is not true."""
    real = msgspec.msgpack.decode(node.ipc.address, type=CudaIpcAddress)
    first, *more = real.regions
    assert isinstance(first, DeviceRegion)
    first = msgspec.structs.replace(
        first, nbytes=first.nbytes - grow, device=device or first.device
    )
    regions = {"regions": (first, *more)}
    return msgspec.msgpack.encode(msgspec.structs.replace(real, **(regions | change)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"host": "elsewhere/pid:[1]"},
            "another host, or in another pid namespace.*transport auto",
        ),
        ({"device": "f" * 32}, "device f+ is not visible"),
        ({"grow": -1}, "past the peer's allocation"),
        ({"pid": 2**31 - 1}, "cannot be watched .No such process"),
        ({"regions": ()}, "length >= 1"),
    ],
)
def test_a_peer_out_of_reach_is_a_clear_error(
    nodes: tuple[Node, Node], change: dict[str, object], said: str
) -> None:
    p, d = nodes
    with pytest.raises(TransportError, match=said):
        d.ipc.connect("p", changed(p, **change))  # type: ignore[arg-type]
    assert SharedMemory.num_open == 0
    d.ipc.connect("p", p.ipc.address)
    d.ipc.read("p", SPANS).wait(WAIT_S)


def test_an_arena_of_another_kind_is_read_by_others(nodes: tuple[Node, Node]) -> None:
    p, _ = nodes
    with closing(ArenaMemory(NBYTES)) as host, closing(SharedIpc("d")) as other:
        other.register(host)
        with pytest.raises(TransportError, match="on a device, the other not; transport auto"):
            other.connect("p", p.ipc.address)


def _live(pipe: Connection) -> None:
    with ExitStack() as stack:
        node = Node(Device(seed=5), stack, 5)
        pipe.send(node.ipc.address)
        pipe.recv()


def test_a_process_that_has_ended_is_not_read(nodes: tuple[Node, Node]) -> None:
    _, d = nodes
    ours, theirs = multiprocessing.Pipe()
    process = forks().Process(target=_live, args=(theirs,))
    process.start()
    try:
        d.ipc.connect("p", ours.recv())
        d.ipc.read("p", SPANS).wait(WAIT_S)
        assert d.now(4096, 4096) == random.Random(5).randbytes(NBYTES)[8192 : 8192 + 4096]
    finally:
        process.kill()
        process.join()
    with pytest.raises(TransportError, match="process of p has ended"):
        d.ipc.read("p", SPANS)


def test_a_device_that_fails_is_an_error_of_the_transport(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = nodes
    d.ipc.connect("p", p.ipc.address)
    transfer = d.ipc.read("p", SPANS)
    assert isinstance(transfer, CudaIpcTransfer)

    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(transfer._copying, "query", fail)
    with pytest.raises(TransportError, match=r"could not copy from p: an illegal"):
        transfer.wait(WAIT_S)


def test_auto_reads_others_by_another_transport(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over cuda_ipc while it reaches the peer; a device that is not seen here over zmq."""
    p, d = nodes
    kinds: dict[str, type[ArenaTransport[Any]]] = {"cuda_ipc": SharedIpc, "zmq": ZmqTransport}
    with ExitStack() as stack:
        make: Callable[[str], AutoTransport] = lambda name: stack.enter_context(  # noqa: E731
            closing(AutoTransport(name, "127.0.0.1", kinds, at_start=1))
        )
        theirs, ours = make("p"), make("d")
        theirs.register(p.arena, p.records)
        ours.register(d.arena, d.records)
        assert host_behind("auto", theirs.address) == this_host()
        for blind in (False, True):
            if blind:
                monkeypatch.setattr("tests.support.nodes.stream_arena.DEVICE", "e" * 32)
                with pytest.raises(OutOfReachError, match="cuda_ipc: the peer's device") as failed:
                    ours.connect("q", theirs.address)
                assert failed.value.left == ("zmq",)
                theirs.offer(failed.value.left)
            ours.connect("q" if blind else "p", theirs.address)
            ours.read("q" if blind else "p", [SpanPair(0, 512 * blind, 512)]).wait(WAIT_S)
            assert d.now(512 * blind, 512) == p.content[:512]


def test_without_a_driver_it_is_not_available() -> None:
    if torch.cuda.is_available():
        pytest.skip("a device is here")
    with pytest.raises(TransportError, match=f"the CUDA driver is not here.*{LIBRARY}"):
        CudaMemory()
