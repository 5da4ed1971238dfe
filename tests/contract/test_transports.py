"""One suite for every transport, between real processes and, as `-hosts`, between two hosts.

Every day the whole suite runs once per transport, and elsewhere what is done otherwise there: that
bytes arrive, and that a read under way ends with its peer or by a cancellation.
"""

import os
import signal
from contextlib import closing
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch

from connector.transports.base import SpanPair, Transport
from connector.transports.choose import open_transport
from connector.transports.shm import ShmTransport
from engine.arena import ArenaMemory
from engine.errors import TransferTimeoutError, TransportError
from tests.support.network.reads import (
    ODD_LENGTHS,
    StartPeer,
    expected,
    permuted_blocks,
    pull,
    pull_in_the_end,
)
from tests.support.network.transport_peer import (
    ARENA_BYTES,
    DEADLINE_S,
    KINDS,
    MIB,
    SECOND_BYTES,
    Peer,
    Road,
)

EVERYWHERE = pytest.mark.parametrize("kind", KINDS, indirect=True)

A_BYTE_APART = [SpanPair(0, 0, 8), SpanPair(9, 9, 1)]
READS = ([SpanPair(0, 0, ARENA_BYTES)], permuted_blocks(), ODD_LENGTHS, A_BYTE_APART)


@EVERYWHERE
def test_exactly_the_named_bytes_arrive(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    for spans in READS:
        arena.tensor.zero_()
        pull(transport, "p", spans)
        assert torch.equal(arena.tensor, expected(peer, spans)), spans


def test_a_region_is_read_into_the_region_of_the_same_number(
    peer: Peer, transport: Transport, arena: ArenaMemory, second: ArenaMemory
) -> None:
    transport.read("p", [SpanPair(100, 7, 4000)], 1).wait(DEADLINE_S)
    assert torch.equal(second.tensor[7:4007], peer.second[100:4100])
    assert not second.tensor[:7].any()
    assert not second.tensor[4007:].any()
    assert not arena.tensor.any()
    with pytest.raises(TransportError, match="past the remote arena"):
        transport.read("p", [SpanPair(SECOND_BYTES - 1, 0, 2)], 1)
    with pytest.raises(TransportError, match="region=2"):
        transport.read("p", [SpanPair(0, 0, 1)], 2)


def test_a_restarted_peer_replaces_the_old_one(
    start: StartPeer, transport: Transport, arena: ArenaMemory
) -> None:
    spans = permuted_blocks()
    old = start(seed=1)
    transport.connect("p", old.address)
    transport.connect("p", old.address)
    pull(transport, "p", spans)
    old.kill()
    new = start(seed=2)
    transport.connect("p", new.address)
    pull(transport, "p", spans)
    assert torch.equal(arena.tensor, expected(new, spans))


def test_reconnecting_drops_the_old_mapping(
    start: StartPeer, transport: Transport, arena: ArenaMemory
) -> None:
    transport.connect("p", start(seed=1).address)
    mappings = memfd_mappings()
    transport.connect("p", start(seed=2).address)
    assert memfd_mappings() == mappings


def test_two_peers_at_once(start: StartPeer, transport: Transport, arena: ArenaMemory) -> None:
    peers = [start("p1", seed=1), start("p2", seed=2)]
    half = ARENA_BYTES // 2
    for peer in peers:
        transport.connect(peer.name, peer.address)
    transfers = [
        transport.read(peer.name, [SpanPair(7, index * half, half - 7)])
        for index, peer in enumerate(peers)
    ]
    for transfer in transfers:
        transfer.wait(DEADLINE_S)
    for index, peer in enumerate(peers):
        got = arena.tensor[index * half : (index + 1) * half - 7]
        assert torch.equal(got, peer.bytes[7:half])


def test_a_forged_address_is_refused(kind: str, start: StartPeer, transport: Transport) -> None:
    peer = start()
    for forged in forge(kind, peer.address):
        with pytest.raises(TransportError):
            transport.connect("p", forged)
            pull(transport, "p", [SpanPair(0, 0, 8)])
    transport.connect("p", peer.address)
    pull(transport, "p", [SpanPair(0, 0, 8)])


def forge(kind: str, address: bytes) -> list[bytes]:
    """Lies in the right form: other files, processes and regions than the one registered."""
    changes: list[dict[str, object]]
    regions: list[dict[str, object]] = []
    if kind == "shm":
        changes = [{"pid": 1}, {"pid": 2**31 - 1}, {"regions": ()}]
        regions = [{"fd": 0}, {"inode": 1}, {"nbytes": 2 * ARENA_BYTES}]
        regions += [{"label": "tandem-arena-0123456789abcdef"}]
    elif kind == "zmq":
        changes = [{"token": "0" * 64}, {"port": 1}, {"token": "f"}, {"nbytes": (0,)}]
        changes += [{"nbytes": ()}]
        changes += [{"host": host} for host in ("0.0.0.0", "224.0.0.1", "localhost", "::", "*")]
    elif kind == "ucx":
        changes = [{"worker": b"\xff" * 300}, {"token": b"\0" * 16}]
        changes += [{"nbytes": (2 * ARENA_BYTES,)}]
    else:
        changes = [{"agent": "someone-else"}, {"metadata": b"\0" * 400}, {"regions": ()}]
        regions = [{"base": 4096}]
    real = msgspec.msgpack.decode(address)
    for change in regions:
        first, *more = real["regions"]
        changes.append({"regions": (first | change, *more)})
    assert all(set(change) <= set(real) for change in changes)
    return [msgspec.msgpack.encode(real | change) for change in changes]


def test_a_killed_peer_is_an_error_or_the_right_bytes(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    pull(transport, "p", [SpanPair(0, 0, 8)])
    spans = [SpanPair(0, 0, ARENA_BYTES)]
    peer.kill()
    try:
        pull(transport, "p", spans)
    except TransferTimeoutError:
        raise
    except TransportError:
        assert transport.name != "shm"
    else:
        assert torch.equal(arena.tensor, expected(peer, spans))


def test_a_peer_killed_before_connect_is_an_error(start: StartPeer, transport: Transport) -> None:
    peer = start()
    peer.kill()
    with pytest.raises(TransportError) as caught:
        transport.connect("p", peer.address)
        pull(transport, "p", [SpanPair(0, 0, 8)])
    assert not isinstance(caught.value, TransferTimeoutError)


@EVERYWHERE
def test_a_peer_killed_while_it_owes_bytes_is_an_error(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    pull(transport, "p", [SpanPair(0, 0, 8)])
    peer.signal(signal.SIGSTOP)
    transfer = transport.read("p", [SpanPair(0, 0, ARENA_BYTES)])
    done = [transfer.poll() for _ in range(100)][-1]  # lets the request leave
    peer.kill()
    if done:
        assert torch.equal(arena.tensor, peer.bytes)
        return
    with pytest.raises(TransportError) as caught:
        transfer.wait(DEADLINE_S)
    assert not isinstance(caught.value, TransferTimeoutError)


def test_one_dead_peer_leaves_the_others_readable(
    start: StartPeer, transport: Transport, arena: ArenaMemory
) -> None:
    dead, alive = start("p1", seed=1), start("p2", seed=2)
    transport.connect("p1", dead.address)
    transport.connect("p2", alive.address)
    dead.kill()
    if transport.name != "shm":
        with pytest.raises(TransportError):
            pull(transport, "p1", [SpanPair(0, 0, MIB)])
    pull(transport, "p2", permuted_blocks())
    wanted = expected(alive, permuted_blocks())
    assert torch.equal(arena.tensor[: 64 * 12_288], wanted[: 64 * 12_288])


@EVERYWHERE
def test_a_cancelled_read_writes_nothing_later(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    pull(transport, "p", [SpanPair(0, 0, 8)])
    peer.signal(signal.SIGSTOP)  # over TCP the read cannot finish
    try:
        transfer = transport.read("p", [SpanPair(0, 0, ARENA_BYTES)])
        pending = not transfer.poll()
        transfer.cancel()
        transfer.cancel()
        arena.tensor.zero_()
    finally:
        peer.signal(signal.SIGCONT)
    if pending:
        with pytest.raises(TransportError, match="cancelled"):
            transfer.poll()
    spans = [SpanPair(MIB, 0, 64)]  # answered after everything that the peer still had to send
    pull_in_the_end(transport, peer, spans)
    assert torch.equal(arena.tensor, expected(peer, spans))


def test_the_first_bytes_can_be_waited_for(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    for spans, share in product(READS, (0.01, 0.5, 1.0)):
        arena.tensor.zero_()
        transfer = transport.read("p", spans)
        wanted = beginning(spans, round(share * sum(span.length for span in spans)))
        transfer.wait(DEADLINE_S, sum(span.length for span in wanted))
        for remote, local, length in wanted:
            here = arena.tensor[local : local + length]
            assert torch.equal(here, peer.bytes[remote : remote + length])
        assert transfer.poll() or share < 1.0
        transfer.wait(DEADLINE_S)
        assert torch.equal(arena.tensor, expected(peer, spans))


def test_the_rest_of_a_read_does_not_come_once_it_is_cancelled(
    peer: Peer, transport: Transport, arena: ArenaMemory
) -> None:
    transfer = transport.read("p", [SpanPair(0, 0, ARENA_BYTES)])
    transfer.wait(DEADLINE_S, 1)
    transfer.cancel()
    arena.tensor.zero_()
    try:
        transfer.wait(DEADLINE_S)
    except TransportError as error:
        assert "cancelled" in str(error)
    assert not arena.tensor.any()


def beginning(spans: list[SpanPair], nbytes: int) -> list[SpanPair]:
    """The first bytes of all."""
    found = []
    for remote, local, length in spans:
        if nbytes > 0:
            found.append(SpanPair(remote, local, min(length, nbytes)))
            nbytes -= length
    return found


def test_a_stopped_peer_is_a_timeout_or_done(peer: Peer, transport: Transport) -> None:
    peer.signal(signal.SIGSTOP)
    try:
        transfer = transport.read("p", [SpanPair(0, 0, ARENA_BYTES)])
        if not transfer.poll():
            with pytest.raises(TransferTimeoutError):
                transfer.wait(0.05)
    finally:
        peer.signal(signal.SIGCONT)


def memfd_mappings() -> int:
    return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), memfd_mappings()


def test_close_gives_everything_back(kind: str, road: Road, start: StartPeer) -> None:
    peers = [start("p1", seed=1), start("p2", seed=2)]

    def live() -> None:
        memory = ArenaMemory(ARENA_BYTES)
        opened = open_transport(kind, "d", host=road.near.address)
        opened.register(memory)
        for peer in peers:
            opened.connect(peer.name, peer.address)
            opened.read(peer.name, permuted_blocks())  # left under way on purpose
        opened.close()
        opened.close()
        memory.close()

    live()  # libraries keep a few descriptors from their first use
    before = held()
    live()
    live()
    assert held() == before


def test_an_arena_is_zeroed_aligned_and_leaves_nothing_behind() -> None:
    before = held()
    memory = ArenaMemory(3 * 4096 + 5, prefault=False)
    assert memory.data_ptr % 4096 == 0
    assert memory.tensor.shape == (3 * 4096 + 5,)
    assert not memory.tensor.any()
    view = memory.tensor[4096:]
    memory.close()
    memory.close()
    view.fill_(7)  # a view outlives `close`; its memory stays mapped
    assert held() == (before[0] + 1, before[1] + 1)
    del view
    assert held() == before
    with pytest.raises(ValueError, match="closed"):
        _ = memory.data_ptr


def test_an_arena_that_is_not_there_is_not_mapped() -> None:
    """A sparse file costs its owner nothing, and would cost whoever maps it all of its size."""
    with closing(ArenaMemory(1 << 40, prefault=False)) as sparse, closing(ShmTransport("p")) as it:
        it.register(sparse)
        with (
            closing(ShmTransport("d")) as opened,
            closing(ArenaMemory(ARENA_BYTES)) as memory,
            pytest.raises(TransportError, match="would take memory for the rest"),
        ):
            opened.register(memory)
            opened.connect("p", it.address)
