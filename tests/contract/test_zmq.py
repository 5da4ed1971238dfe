"""Threats to zmq alone: hostile frames, hostile owners, readers that take nothing."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import pytest
import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator

from connector.transports.address import decode_address
from connector.transports.base import SpanPair, Transfer
from connector.transports.zmq import Link, ZmqTransport, chunks
from connector.transports.zmq_owner import (
    CHUNK_BYTES,
    CHUNK_PIECES,
    MAX_REQUEST_BYTES,
    USER,
    WINDOW,
    AnswerHeader,
    ArenaOwner,
    Context,
    PieceRequest,
    ZmqAddress,
)
from engine.arena import ArenaMemory
from engine.errors import TransferTimeoutError, TransportError
from tests.support.network.transport_peer import ARENA_BYTES, DEADLINE_S, MIB, pattern

DEADLINE_MS = int(1000 * DEADLINE_S)
TOKEN = "ab" * 32


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def owner() -> Iterator[ZmqAddress]:
    """An owner of `pattern(1)`; it must still be serving at the end."""
    memory = ArenaMemory(ARENA_BYTES)
    memory.tensor.copy_(pattern(1))
    serving = ArenaOwner([memory], "127.0.0.1")
    address = decode_address(serving.address, ZmqAddress)
    yield address
    check_serves(address)
    serving.close()
    memory.close()


@pytest.fixture
def transport(arena: ArenaMemory) -> Iterator[ZmqTransport]:
    opened = ZmqTransport("d")
    opened.register(arena)
    yield opened
    opened.close()


def check_serves(address: ZmqAddress) -> None:
    context, target = Context(), ArenaMemory(64)
    link = Link(context, address)
    number = link.ask(piece := [SpanPair(ARENA_BYTES - 64, 0, 64)])
    while not link.take(number, piece, target):
        link.check()
        link.pause(DEADLINE_S)
    link.close()
    context.term()
    assert torch.equal(target.tensor, pattern(1)[-64:])
    target.close()


def dial(
    context: Context, address: ZmqAddress, token: str | None, *, later: bool = False
) -> "zmq.Socket[bytes]":
    """A reader without manners; `later`: it does not connect yet."""
    opened = context.socket(zmq.DEALER)
    opened.linger, opened.reconnect_ivl = 0, -1
    opened.set_hwm(0)
    if token is not None:
        opened.plain_username = b"somebody"
        opened.plain_password = token.encode()
    if not later:
        opened.connect(f"tcp://{address.host}:{address.port}")
    return opened


def encode(number: int, *pieces: tuple[int, int], region: int = 0) -> bytes:
    return msgspec.msgpack.encode((number, pieces, region))


HOSTILE = {
    "nothing": [b""],
    "junk": [b"\xff" * 100],
    "cut": [encode(1, (0, 8))[:-1]],
    "another type": [msgspec.msgpack.encode({"number": 1})],
    "negative offset": [encode(1, (-8, 8))],
    "negative length": [encode(1, (8, -8))],
    "negative number": [encode(-1, (0, 8))],
    "no length": [encode(1, (0, 0))],
    "no pieces": [encode(1)],
    "past the end": [encode(1, (0, 8), (ARENA_BYTES - 7, 8))],
    "far past the end": [encode(1, (2**63 - 1, CHUNK_BYTES))],
    "no 64-bit number": [encode(1, (2**64 - 1, 8))],
    "too long": [encode(1, (0, CHUNK_BYTES + 1))],
    "too much": [encode(1, (0, CHUNK_BYTES), (0, 1))],
    "too many": [encode(1, *[(0, 1)] * (CHUNK_PIECES + 1))],
    "two frames": [encode(1, (0, 8)), b""],
    "another region": [encode(1, (0, 8), region=1)],
}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_request_is_refused_without_a_byte(
    owner: ZmqAddress, context: Context, frames: list[bytes]
) -> None:
    reader = dial(context, owner, owner.token)
    reader.send_multipart(frames)
    assert reader.poll(DEADLINE_MS)
    (header,) = reader.recv_multipart()
    assert msgspec.msgpack.decode(header, type=AnswerHeader).refusal
    reader.send(encode(7, (3, 5)))
    assert reader.poll(DEADLINE_MS)
    header, piece = reader.recv_multipart()
    assert msgspec.msgpack.decode(header, type=AnswerHeader) == AnswerHeader(7)
    assert piece == pattern(1)[3:8].numpy().tobytes()


@pytest.mark.parametrize("token", [None, "x", "0" * 64, TOKEN, "x" * 255])
def test_without_the_token_nobody_is_let_in(
    owner: ZmqAddress, context: Context, token: str | None
) -> None:
    reader = dial(context, owner, token, later=True)
    monitor = reader.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
    reader.connect(f"tcp://{owner.host}:{owner.port}")
    with suppress(zmq.Again):  # it may be closed already, and is never opened again
        reader.send(encode(1, (0, 8)), zmq.NOBLOCK)
    assert monitor.poll(DEADLINE_MS)
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    monitor.close(0)
    assert event == zmq.Event.DISCONNECTED
    assert not reader.poll(0)


def test_another_incarnation_is_told_from_a_dead_peer(
    owner: ZmqAddress, transport: ZmqTransport
) -> None:
    stale = msgspec.structs.replace(owner, token=TOKEN)
    transport.connect("p", msgspec.msgpack.encode(stale))
    with pytest.raises(TransportError, match="another incarnation"):
        transport.read("p", [SpanPair(0, 0, 8)]).wait(DEADLINE_S)


def test_a_request_over_the_limit_closes_its_connection(
    owner: ZmqAddress, context: Context
) -> None:
    reader = dial(context, owner, owner.token)
    monitor = reader.get_monitor_socket(int(zmq.Event.DISCONNECTED))
    reader.send(bytes(MAX_REQUEST_BYTES + 1))
    assert monitor.poll(DEADLINE_MS)
    monitor.close(0)


def test_bytes_that_are_not_zeromq_harm_nobody(owner: ZmqAddress) -> None:
    for junk in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 65_536):
        with socket.create_connection((owner.host, owner.port)) as stream:
            stream.sendall(junk)


def test_a_reader_that_takes_nothing_is_owed_a_bounded_number_of_answers(
    owner: ZmqAddress, context: Context
) -> None:
    asked = 200
    greedy, modest = (dial(context, owner, owner.token) for _ in range(2))
    for number in range(asked):
        greedy.send(encode(number, (0, CHUNK_BYTES)))
    for number in range(2 * asked):  # the owner turns from one reader to the other
        modest.send(encode(number, (0, 8)))
        assert modest.poll(DEADLINE_MS)
        modest.recv_multipart()
    answered = 0
    last, number = asked, -1
    while number < asked:  # a question that was answered: all before it were, or never will be
        greedy.send(encode(last, (0, 8)))
        last += 1
        assert greedy.poll(DEADLINE_MS)
        number = msgspec.msgpack.decode(greedy.recv_multipart()[0], type=AnswerHeader).number
        answered += number < asked
    assert 0 < answered < asked // 2


def test_the_owner_listens_on_its_host_alone(arena: ArenaMemory) -> None:
    opened = ZmqTransport("d", "127.0.0.2")
    opened.register(arena)
    address = msgspec.msgpack.decode(opened.address, type=ZmqAddress)
    socket.create_connection((address.host, address.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port))
    opened.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address.port))
    assert not any(thread.name.startswith("kv-zmq") for thread in threading.enumerate())


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0"], ids=["of another machine", "of none"])
def test_a_host_where_nobody_can_listen_is_a_typed_error(arena: ArenaMemory, host: str) -> None:
    with pytest.raises(TransportError, match=f"cannot listen on '{host}'"):
        ZmqTransport("d", host).register(arena)


class ScriptedOwner:
    """An owner that answers when and what the test says."""

    def __init__(self, context: Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.set_hwm(0)  # its answers have hundreds of frames, and nobody may be reading
        self.socket.plain_server = True
        self.socket.bind("tcp://127.0.0.1:*")
        port = int(self.socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.address = msgspec.msgpack.encode(ZmqAddress("127.0.0.1", port, (ARENA_BYTES,), TOKEN))

    def hear(self, timeout_ms: int = DEADLINE_MS) -> tuple[bytes, PieceRequest] | None:
        if not self.socket.poll(timeout_ms):
            return None
        reader, request = self.socket.recv_multipart()
        return reader, msgspec.msgpack.decode(request, type=PieceRequest)

    def must_hear(self) -> tuple[bytes, PieceRequest]:
        heard = self.hear()
        assert heard is not None
        return heard

    def answer(self, reader: bytes, request: PieceRequest, fill: bytes) -> None:
        pieces = [fill * length for _, length in request.pieces]
        self.socket.send_multipart([reader, header(request.number), *pieces])


def header(number: int) -> bytes:
    return msgspec.msgpack.encode(AnswerHeader(number))


@pytest.fixture
def scripted(context: Context, transport: ZmqTransport) -> Iterator[ScriptedOwner]:
    door = ThreadAuthenticator(context)
    door.start()
    door.configure_plain(passwords={USER.decode(): TOKEN})
    made = ScriptedOwner(context)
    transport.connect("p", made.address)
    yield made
    door.stop()


def test_a_read_asks_for_one_window_and_then_answer_by_answer(
    scripted: ScriptedOwner, transport: ZmqTransport, arena: ArenaMemory
) -> None:
    small = [SpanPair(i, i, 1) for i in range(2 * WINDOW * CHUNK_PIECES)]
    transfer = transport.read("p", small)
    waiting = [scripted.must_hear() for _ in range(WINDOW)]
    assert not transfer.poll()
    assert scripted.hear(100) is None
    for _ in range(WINDOW):
        scripted.answer(*waiting.pop(0), b"\7")
        while scripted.socket.poll(0) == 0:
            assert not transfer.poll()
        waiting.append(scripted.must_hear())
        assert scripted.hear(20) is None
    for reader, request in waiting:
        scripted.answer(reader, request, b"\7")
    transfer.wait(DEADLINE_S)
    assert int(arena.tensor.sum()) == 7 * len(small)


def test_answers_after_a_cancel_reach_nobody(
    scripted: ScriptedOwner, transport: ZmqTransport, arena: ArenaMemory
) -> None:
    spans = [SpanPair(0, 0, 64)]
    transfer = transport.read("p", spans)
    reader, request = scripted.must_hear()
    transfer.cancel()
    transfer.cancel()
    scripted.answer(reader, request, b"\xff")
    with pytest.raises(TransportError, match="cancelled"):
        transfer.poll()
    again = transport.read("p", spans)
    reader, request = scripted.must_hear()
    assert not arena.tensor.any()
    scripted.answer(reader, request, b"\1")
    again.wait(DEADLINE_S)
    assert int(arena.tensor.sum()) == 64


@pytest.mark.parametrize("ending", ["cancel", "disconnect", "close"])
def test_a_waiting_thread_hears_of_the_end(
    scripted: ScriptedOwner, transport: ZmqTransport, ending: str
) -> None:
    transfer = transport.read("p", [SpanPair(0, 0, 64)])
    failures: list[str] = []
    thread = threading.Thread(target=lambda: failures.append(failure_of(transfer)))
    thread.start()
    ends: dict[str, Callable[[], None]] = {
        "cancel": transfer.cancel,
        "disconnect": lambda: transport.disconnect("p"),
        "close": transport.close,
    }
    ends[ending]()
    thread.join(DEADLINE_S)
    word = "disconnected" if ending == "disconnect" else "cancelled"
    assert [word in failure for failure in failures] == [True]


def failure_of(transfer: Transfer) -> str:
    with pytest.raises(TransportError) as caught:
        transfer.wait(DEADLINE_S)
    assert not isinstance(caught.value, TransferTimeoutError)
    return str(caught.value)


LIES = {
    "junk header": [b"\xff"],
    "long header": [bytes(4096)],
    "another number": [header(99), bytes(64), bytes(64)],
    "no pieces": [header(1)],
    "one piece short": [header(1), b"\1" * 64],
    "one piece more": [header(1), b"\1" * 64, b"\1" * 64, b"\1" * 64],
    "a short piece": [header(1), b"\1" * 63, b"\1" * 64],
    "a long piece": [header(1), b"\1" * 65, b"\1" * 64],
    "over the limit": [header(1), bytes(CHUNK_BYTES + 1)],
    "a refusal": [msgspec.msgpack.encode(AnswerHeader(1, "no")), b"\1" * 64, b"\1" * 64],
}


@pytest.mark.parametrize("frames", LIES.values(), ids=LIES)
def test_a_wrong_answer_is_an_error_and_writes_nothing_beside_its_spans(
    scripted: ScriptedOwner, transport: ZmqTransport, arena: ArenaMemory, frames: list[bytes]
) -> None:
    transfer = transport.read("p", [SpanPair(0, 128, 64), SpanPair(0, 256, 64)])
    reader, _ = scripted.must_hear()
    scripted.socket.send_multipart([reader, *frames])
    assert failure_of(transfer)
    with pytest.raises(TransportError):
        transfer.poll()
    written = arena.tensor.clone()
    written[128:192] = 0
    written[256:320] = 0
    assert not written.any()


def test_very_many_requests_in_a_row(
    owner: ZmqAddress, transport: ZmqTransport, arena: ArenaMemory
) -> None:
    transport.connect("p", msgspec.msgpack.encode(owner))
    spans = [SpanPair(i, i, 1) for i in range(0, MIB, 16)]
    for _ in range(3):
        transport.read("p", spans).wait(DEADLINE_S)
    assert torch.equal(arena.tensor[:MIB:16], pattern(1)[:MIB:16])


def test_connections_are_used_again_and_never_kept_without_bound(
    owner: ZmqAddress, transport: ZmqTransport
) -> None:
    transport.connect("p", msgspec.msgpack.encode(owner))
    for _ in range(2):
        reads = [transport.read("p", [SpanPair(0, 64 * i, 64)]) for i in range(20)]
        for read in reads:
            read.wait(DEADLINE_S)
    kept = transport._peers["p"].idle
    assert 0 < len(kept) <= 8
    first = kept[-1]
    transport.read("p", [SpanPair(0, 0, 8)]).wait(DEADLINE_S)
    assert kept[-1] is first


def test_chunks_cover_the_spans_within_their_bounds() -> None:
    spans = [SpanPair(5, 9, 3 * CHUNK_BYTES + 1), SpanPair(0, 4 * CHUNK_BYTES + 99, 7)]
    spans += [SpanPair(i, 5 * CHUNK_BYTES + i, 1) for i in range(CHUNK_PIECES + 3)]
    made = list(chunks(spans))
    assert all(len(chunk) <= CHUNK_PIECES for chunk in made)
    assert all(sum(piece.length for piece in chunk) <= CHUNK_BYTES for chunk in made)
    pieces = [piece for chunk in made for piece in chunk]
    for span in spans:
        covered = 0
        while covered < span.length:
            piece = pieces.pop(0)
            assert (piece.remote - span.remote, piece.local - span.local) == (covered, covered)
            covered += piece.length
    assert not pieces
