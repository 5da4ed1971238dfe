"""The process that serves a host arena over NIXL: its life, and what its death costs.

UCX aborts the process when a reader leaves that it still owes bytes; here a signal kills it.
"""

import os
import resource
import signal
import time
from contextlib import closing, suppress
from functools import partial

import pytest
import torch

from connector.transports import nixl
from connector.transports.address import decode_address
from connector.transports.base import SpanPair, Transport
from connector.transports.nixl_agent import NixlAddress, NixlAgent, NixlRegion, load_nixl
from connector.transports.nixl_server import OwnerProcess
from engine.arena import ArenaMemory
from engine.errors import TransportError
from tests.support.network.reads import (
    StartPeer,
    expected,
    permuted_blocks,
    pull,
    pull_in_the_end,
    until,
)
from tests.support.network.transport_peer import ARENA_BYTES, Peer
from tests.support.nodes.leaks import children_of, excess, held_by, listening

OVER_NIXL = pytest.mark.parametrize("kind", ["nixl"], indirect=True)


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/maps") and bool(held_by(pid))


@pytest.fixture
def owner(transport: Transport, arena: ArenaMemory, start: StartPeer) -> tuple[Peer, int]:
    """A peer that has been read from, and the process that serves its arena."""
    peer = start()
    transport.connect("p", peer.address)
    pull(transport, "p", [SpanPair(0, 0, 64)])
    arena.tensor.zero_()
    (pid,) = children_of(peer.pid)
    return peer, pid


@OVER_NIXL
def test_another_one_takes_the_place_of_one_that_is_aborted(
    owner: tuple[Peer, int], transport: Transport, arena: ArenaMemory
) -> None:
    peer, pid = owner
    for _ in range(2):
        before = peer.address_now()
        os.kill(pid, signal.SIGABRT)
        until(lambda: peer.address_now() != before)  # noqa: B023 - called at once
        arena.tensor.zero_()
        pull_in_the_end(transport, peer, permuted_blocks())
        assert torch.equal(arena.tensor, expected(peer, permuted_blocks()))
        (pid,) = children_of(peer.pid)


@OVER_NIXL
def test_only_the_address_of_the_node_listens(owner: tuple[Peer, int]) -> None:
    """In the node, whose reader is an agent too, and in the process that serves."""
    peer, pid = owner
    assert {host for host, _ in listening(peer.pid) | listening(pid)} == {"127.0.0.1"}


@pytest.mark.parametrize("kind", ["nixl", "nixl-tcp"], indirect=True)
def test_nobody_who_knows_the_address_can_write_the_arena(
    owner: tuple[Peer, int], transport: Transport, arena: ArenaMemory
) -> None:
    """At worst the write ends the process that serves, and the next one starts."""
    peer, _ = owner
    before = peer.address_now()
    with closing(ArenaMemory(ARENA_BYTES)) as noise:
        noise.tensor.fill_(255)
        write(decode_address(before, NixlAddress), noise)
    pull_in_the_end(transport, peer, permuted_blocks())
    assert torch.equal(arena.tensor, expected(peer, permuted_blocks()))


def write(peer: NixlAddress, noise: ArenaMemory) -> None:
    """Tries to write into the peer's arena, as a foreign program would, until it is stopped."""
    region = NixlRegion(noise.data_ptr, noise.nbytes, "DRAM", 0)
    with closing(NixlAgent("intruder", [region], progress_thread=False, devices="lo")) as agent:
        bindings, ours = agent._nixl, (noise.data_ptr, noise.nbytes, 0)
        agent.load(peer.metadata, peer.agent)
        lists = [
            bindings.nixlXferDList(bindings.DRAM_SEG, [region])
            for region in (ours, (peer.regions[0].base, noise.nbytes, 0))
        ]
        create = agent._agent.createXferReq
        request = create(bindings.NIXL_WRITE, *lists, peer.agent, b"", agent._backends)
        with suppress(TransportError):
            is_done = agent.post(request)
            deadline = time.monotonic() + 2
            while not is_done and time.monotonic() < deadline:
                is_done = agent.is_done(request)
        for step in (
            partial(agent.release, request),
            partial(agent.unload, peer.agent),
            agent.close,
        ):
            with suppress(TransportError):
                step()


@OVER_NIXL
def test_a_read_of_one_that_is_gone_is_an_error_and_writes_nothing(
    owner: tuple[Peer, int], transport: Transport, arena: ArenaMemory
) -> None:
    _, pid = owner
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid))
    with pytest.raises(TransportError):
        pull(transport, "p", [SpanPair(0, 0, ARENA_BYTES)])
    assert not arena.tensor.any()


@OVER_NIXL
def test_memory_of_a_device_is_served_by_the_node_itself(
    transport: Transport, arena: ArenaMemory
) -> None:
    """The node serves it like any other memory; here host memory stands for a device's."""
    with closing(ArenaMemory(ARENA_BYTES)) as served:
        served.tensor.random_(256)
        region = NixlRegion(served.data_ptr, served.nbytes, "DRAM", 0)
        agent = NixlAgent("p", [region], progress_thread=True, devices="lo")
        with closing(agent) as here:
            transport.connect("p", here.address)
            pull(transport, "p", [SpanPair(0, 0, ARENA_BYTES)])
            assert torch.equal(arena.tensor, served.tensor)
            transport.disconnect("p")


@OVER_NIXL
def test_it_ends_with_the_node_however_that_ends(owner: tuple[Peer, int]) -> None:
    peer, pid = owner
    os.kill(peer.pid, signal.SIGKILL)
    until(lambda: not is_running(pid))


@OVER_NIXL
def test_it_outlives_what_a_terminal_sends_to_the_node(owner: tuple[Peer, int]) -> None:
    peer, pid = owner
    assert os.getsid(pid) == pid != os.getsid(peer.pid)


def test_closing_leaves_nothing() -> None:
    before = held_by(os.getpid())
    with closing(ArenaMemory(ARENA_BYTES)) as arena:
        assert arena.fd is not None
        owner = OwnerProcess("p", [(arena.fd, arena.nbytes)], devices="lo")
        assert owner._process.pid in children_of(os.getpid())
        owner.close()
        owner.close()
        assert not is_running(owner._process.pid)
    assert not excess(before, held_by(os.getpid()))


def test_a_node_that_cannot_open_its_reader_is_not_served_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise TransportError("refused by the test")

    monkeypatch.setattr(nixl, "NixlAgent", refuse)
    before = held_by(os.getpid())
    with closing(ArenaMemory(ARENA_BYTES)) as arena:
        with pytest.raises(TransportError, match="refused by the test"):
            nixl.NixlTransport("p").register(arena)
        assert not excess(before, held_by(os.getpid()))["child"]
    assert not excess(before, held_by(os.getpid()))


def test_what_cannot_be_served_is_an_error_that_says_why() -> None:
    before = held_by(os.getpid())
    with closing(ArenaMemory(ARENA_BYTES)) as arena:
        assert arena.fd is not None
        with pytest.raises(TransportError, match=r"could not serve the arena.*(mmap|length)"):
            OwnerProcess("p", [(arena.fd, 2 * ARENA_BYTES)], devices="lo")
    assert not excess(before, held_by(os.getpid()))


def test_a_node_with_many_descriptors_is_served_too(arena: ArenaMemory) -> None:
    """`select.select` knows none beyond 1,023."""
    assert arena.fd is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.dup(arena.fd) for _ in range(1100)]
    try:
        with closing(OwnerProcess("p", [(arena.fd, arena.nbytes)], devices="lo")) as owner:
            assert owner.address
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_room_for_another_process_is_a_typed_error(arena: ArenaMemory) -> None:
    """Whoever watches over one tries again after that."""
    assert arena.fd is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    load_nixl()  # opens files the first time
    lowest = os.dup(arena.fd)  # of the free ones: the limit is on numbers, which may have gaps
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(TransportError, match=r"no process.*Too many open files"):
            OwnerProcess("p", [(arena.fd, arena.nbytes)], devices="lo")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
