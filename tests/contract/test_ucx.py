"""Promises of the ucx transport alone: its frames, its tokens, its connections."""

import os
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from connector.transports.address import decode_address
from connector.transports.base import SpanPair, check_pieces
from connector.transports.ucx import DIRECT_BYTES, PART_BYTES, UcxTransport, plan_parts
from connector.transports.ucx_server import (
    MAX_FRAME_BYTES,
    MAX_PART_BYTES,
    MAX_PART_SPANS,
    REFUSAL_BYTES,
    REQUEST_TAG,
    PartRequest,
    UcxAddress,
    decode_frame,
    encode_frame,
)
from connector.transports.ucx_worker import UcxWorker, network_devices
from engine.arena import ArenaMemory
from engine.distribution import how_to_install
from engine.errors import ConfigError, TransferTimeoutError, TransportError
from tests.support.network.transport_peer import ARENA_BYTES, DEADLINE_S, MIB, Peer
from tests.support.nodes.leaks import listening

# Not imported here: that would come before the tests of NIXL (see tests/conftest.py).
pytestmark = pytest.mark.skipif(
    find_spec("ucxx") is None, reason=f"ucxx is not installed: {how_to_install('ucx')}"
)

WHOLE = [SpanPair(0, 0, ARENA_BYTES)]
TOKEN = bytes(range(16))


@pytest.fixture
def peer() -> Iterator[Peer]:
    opened = Peer("ucx", "p", 1)
    yield opened
    opened.stop()


@pytest.fixture
def transport(arena: ArenaMemory) -> Iterator[UcxTransport]:
    opened = UcxTransport("d")
    opened.register(arena)
    yield opened
    opened.close()


def test_every_byte_is_in_one_part_and_no_part_is_too_big() -> None:
    lengths = [1, DIRECT_BYTES - 1, DIRECT_BYTES, PART_BYTES, 2 * PART_BYTES + 5, *[3] * 5000]
    starts = np.cumsum([0, *lengths]).tolist()
    spans = [SpanPair(7 + at, at, length) for at, length in zip(starts, lengths, strict=False)]
    parts = list(plan_parts(spans))
    pieces = sorted((span.local, span.remote, span.length) for part in parts for span in part.spans)
    end = 0
    for local, remote, length in pieces:
        assert (local, remote) == (end, end + 7)
        end += length
    assert end == sum(lengths)
    assert max(part.nbytes for part in parts) <= PART_BYTES
    assert max(len(part.spans) for part in parts) <= MAX_PART_SPANS
    assert len(parts) == 9  # 4 direct ones, and 5,003 small spans in 5


def test_large_spans_share_a_request_but_no_message() -> None:
    size = PART_BYTES // 4
    spans = [SpanPair(2 * at, at, size) for at in range(0, 8 * size, size)]
    assert size >= DIRECT_BYTES
    parts = list(plan_parts([*spans, SpanPair(0, 8 * size, 1), SpanPair(9, 8 * size + 1, 1)]))
    assert [(len(part.spans), part.joined) for part in parts] == [(4, False), (4, False), (2, True)]


def test_large_and_small_spans_of_one_read_all_arrive(
    peer: Peer, transport: UcxTransport, arena: ArenaMemory
) -> None:
    lengths = [DIRECT_BYTES, 100, DIRECT_BYTES + 7, 1, 3 * DIRECT_BYTES, 5_000]
    ends = np.cumsum(lengths).tolist()
    spans = [
        SpanPair(ARENA_BYTES - end, end - length, length)
        for end, length in zip(ends, lengths, strict=True)
    ]
    transport.connect("p", peer.address)
    transport.read("p", spans).wait(DEADLINE_S)
    for remote, local, length in spans:
        expected = peer.bytes[remote : remote + length]
        assert torch.equal(arena.tensor[local : local + length], expected)
    assert not arena.tensor[ends[-1] :].any()


def asked(*spans: tuple[int, int]) -> PartRequest:
    return PartRequest(TOKEN, b"reader", 3, 4, list(spans), joined=True)


def test_a_frame_comes_back_as_it_was() -> None:
    request = asked((0, 1), (5, 9))
    padded = np.zeros(MAX_FRAME_BYTES, dtype=np.uint8)
    frame = encode_frame(request)
    padded[: len(frame)] = frame
    assert decode_frame(padded.data) == request


def test_the_longest_frame_fits() -> None:
    spans = [(2**63 - 1 - index, MAX_PART_BYTES) for index in range(MAX_PART_SPANS)]
    request = PartRequest(TOKEN, bytes(16 * 1024), 2**63 - 1, 2**63 - 1, spans, joined=True)
    assert len(encode_frame(request)) <= MAX_FRAME_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"token": b"short"},
        {"reader": b""},
        {"reader": bytes(20_000)},
        {"tag": -1},
        {"spans": []},
        {"spans": [(0, 0)]},
        {"spans": [(-1, 8)]},
        {"spans": [(0, MAX_PART_BYTES + 1)]},
        {"spans": [(0, 1)] * (MAX_PART_SPANS + 1)},
    ],
    ids=lambda change: repr(change)[:30],
)
def test_a_frame_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    bad = msgspec.structs.replace(asked((0, 1)), **change)
    with pytest.raises(TransportError, match="not a request"):
        decode_frame(encode_frame(bad).data)


def test_cut_and_oversized_frames_are_refused() -> None:
    frame = encode_frame(asked((0, 1)))
    for length in range(4, len(frame)):
        with pytest.raises(TransportError, match="over"):
            decode_frame(frame[:length].data)
    with pytest.raises(TransportError, match="not a request"):
        decode_frame(np.zeros(64, dtype=np.uint8).data)


def test_the_owner_checks_every_span() -> None:
    check_pieces([(0, 50), (50, 50)], 0, sizes=[100], most=100)
    with pytest.raises(TransportError, match="50 B at 51"):
        check_pieces([(0, 50), (51, 50)], 0, sizes=[100], most=200)
    with pytest.raises(TransportError, match="100 B in one request are over 99 B"):
        check_pieces([(0, 50), (0, 50)], 0, sizes=[100], most=99)
    with pytest.raises(TransportError, match="no region 1"):
        check_pieces([(0, 1)], 1, sizes=[100], most=100)


def lie(peer: Peer, **change: object) -> bytes:
    """The peer's address with a change, and with the digest that belongs to it."""
    real = decode_address(peer.address, UcxAddress)
    told: dict[str, Any] = {"token": real.token, "nbytes": real.nbytes, **change}
    return msgspec.msgpack.encode(UcxAddress.of(real.worker, **told))


def test_the_owner_refuses_what_is_outside_its_arena(
    peer: Peer, transport: UcxTransport, arena: ArenaMemory
) -> None:
    transport.connect("p", lie(peer, nbytes=(2 * ARENA_BYTES,)))
    with pytest.raises(TransportError, match=r"refused a read: .* end past the arena"):
        transport.read("p", [SpanPair(ARENA_BYTES - 4, 0, 8)]).wait(DEADLINE_S)
    assert not arena.tensor.any()
    transport.read("p", WHOLE).wait(DEADLINE_S)
    assert torch.equal(arena.tensor, peer.bytes)


def test_without_the_token_nothing_is_read(
    peer: Peer, transport: UcxTransport, arena: ArenaMemory
) -> None:
    transport.connect("p", lie(peer, token=TOKEN))
    with pytest.raises(TransferTimeoutError):
        transport.read("p", WHOLE).wait(0.3)
    assert not arena.tensor.any()
    transport.connect("p", peer.address)
    transport.read("p", WHOLE).wait(DEADLINE_S)
    assert torch.equal(arena.tensor, peer.bytes)


def hostile_frames(real: UcxAddress) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(5)
    for length in (1, 3, 4, 100, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 3 * MIB):
        yield generator.integers(0, 256, length, dtype=np.uint8)
    good = msgspec.structs.replace(asked((0, 8)), token=real.token)
    frame = encode_frame(good)
    for place in range(4, 20):
        broken = frame.copy()
        broken[place] ^= 0xFF
        yield broken
    yield encode_frame(msgspec.structs.replace(good, token=TOKEN))


def test_hostile_frames_do_not_stop_the_owner(
    peer: Peer, transport: UcxTransport, arena: ArenaMemory
) -> None:
    real = decode_address(peer.address, UcxAddress)
    attacker = UcxWorker("127.0.0.1")
    endpoint = attacker.connect(real.worker)
    sent = [
        attacker.send(endpoint, frame, tag)
        for tag, frame in enumerate(hostile_frames(real), start=REQUEST_TAG)
    ]
    until = time.monotonic() + DEADLINE_S
    while not all(request.handle.completed for request in sent) and time.monotonic() < until:
        attacker.progress()
    assert all(request.handle.completed for request in sent)
    transport.connect("p", peer.address)
    transport.read("p", WHOLE).wait(DEADLINE_S)
    assert torch.equal(arena.tensor, peer.bytes)
    attacker.close()


def test_a_reader_may_not_pile_up_parts(peer: Peer) -> None:
    real = decode_address(peer.address, UcxAddress)
    greedy = UcxWorker("127.0.0.1")
    endpoint = greedy.connect(real.worker)
    refusal = greedy.receive(np.zeros(REFUSAL_BYTES, dtype=np.uint8), 99)
    request = PartRequest(real.token, greedy.address(), 7, 99, [(0, ARENA_BYTES)], joined=False)
    other = REQUEST_TAG + 1  # whatever its tag: what nobody takes would pile up unread
    sent: list[object] = []
    until = time.monotonic() + DEADLINE_S
    while not greedy.is_done(refusal) and time.monotonic() < until:
        # On a busy machine a burst may arrive one by one, each answered before the next comes.
        if time.monotonic() >= until - DEADLINE_S + len(sent) / 20:
            sent += [greedy.send(endpoint, encode_frame(request), other) for _ in range(20)]
        greedy.progress()
    assert b"parts in flight" in refusal.buffer.tobytes()
    greedy.close()


def test_a_lost_connection_comes_back_with_the_next_read(
    peer: Peer, transport: UcxTransport, arena: ArenaMemory
) -> None:
    transport.connect("p", peer.address)
    for _ in range(3):
        transfer = transport.read("p", WHOLE)
        if not transfer.poll():
            transport.disconnect("p")
            with pytest.raises(TransportError, match="disconnected"):
                transfer.poll()
        arena.tensor.zero_()
        transport.connect("p", peer.address)
        assert not arena.tensor.any()
    transport.read("p", WHOLE).wait(DEADLINE_S)
    assert torch.equal(arena.tensor, peer.bytes)


def test_two_names_for_one_worker_are_two_connections(
    peer: Peer, transport: UcxTransport, arena: ArenaMemory
) -> None:
    for name in ("p", "q"):
        transport.connect(name, peer.address)
    transport.disconnect("p")
    transport.read("q", WHOLE).wait(DEADLINE_S)
    assert torch.equal(arena.tensor, peer.bytes)


def test_a_host_means_its_interface() -> None:
    assert network_devices("127.0.0.1") == "lo"
    assert network_devices("localhost") == "lo"
    for host in ("203.0.113.9", "0.0.0.0"):  # what a node tells its peers is never a wildcard
        with pytest.raises(ConfigError, match=re.escape(host)):
            network_devices(host)


def test_only_loopback_listens(arena: ArenaMemory) -> None:
    before = listening(os.getpid())
    opened = UcxTransport("d", "127.0.0.1")
    opened.register(arena)
    new = {host for host, _ in listening(os.getpid()) - before}
    opened.close()
    assert new == {"127.0.0.1"}
