"""The HTTP server's connections: small writes leave at once, and nobody keeps others out."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.types import GenerateOutput
from serving.api.app import create_app
from serving.config import NodeConfig
from serving.http.connection import Connection, ConnectionLimits
from serving.http.server import HttpServer
from tests.support.api.api_double import ScriptedGenerator, tiny_serving, tiny_tokenizer

GET = b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /deaf HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
SHORT = ConnectionLimits(header_timeout_s=0.4, keep_alive_timeout_s=0.4, linger_timeout_s=0.4)
OFFER_NAMES = ("connection", "upgrade", "http2-settings")
OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    b"upgrade: websocket\r\nconnection: keep-alive, upgrade\r\n",
    b"Connection: upgrade\r\nUpgrade: TLS/1.0, HTTP/2.0\r\n",
)
MALFORMED = {
    b"hello\r\n\r\n": 400,
    b"BREW /quick HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"GET /quick HTTP/9.9\r\n\r\n": 400,
    b"GET /quick HTTP/1.1\r\nContent-Length: many\r\n\r\n": 400,
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"POST /quick HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n": 400,
    b"GET /" + b"a" * 100_000: 431,
    b"GET /quick HTTP/1.1\r\nA: " + b"a" * 100_000: 431,
    b"GET /quick HTTP/1.1\r\n" + b"A: a\r\n" * 20_000: 431,
}


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[HttpServer]:
    """A server that answers /quick at once and /slow when it must; /deaf reads no body.

    /echo answers with what it has read: the method, the headers but for an offer, and the body.
    """

    async def quick(request: Request) -> Response:
        await request.body()
        return Response(b"quick")

    async def echo(request: Request) -> Response:
        headers = [(k, v) for k, v in request.headers.items() if k not in OFFER_NAMES]
        return Response(f"{request.method} {headers} ".encode() + await request.body())

    async def slow(request: Request) -> Response:
        await asyncio.sleep(1.0)
        return Response(b"slow")

    async def deaf(request: Request) -> Response:
        return Response(b"no", 401)

    methods = ["GET", "POST"]
    paths = {"/quick": quick, "/slow": slow, "/deaf": deaf, "/echo": echo}
    app = Starlette(routes=[Route(path, to, methods=methods) for path, to in paths.items()])
    async with running(app, limits) as server:
        yield server


@asynccontextmanager
async def running(app: Starlette, limits: ConnectionLimits) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0, drain_timeout_s=1, limits=limits)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server has closed."""
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def asked(server: HttpServer, request: bytes = GET) -> bytes:
    """The whole answer to a request on a connection of its own."""
    reader, writer = await connect(server)
    writer.write(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
    answer = await until_closed(reader)
    writer.close()
    return answer


async def test_connections_have_no_nagle_delay() -> None:
    async with serving(ConnectionLimits()) as server:
        _, writer = await connect(server)
        await asyncio.sleep(0.05)  # until the server has accepted
        accepted = [
            state.transport.get_extra_info("socket")
            for state in server._server.server_state.connections
        ]
        options = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in accepted]
        assert options == [1]
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"GET /quick HTTP/1.1\r\nHo", b"HTTP/1.1 408"),
        (GET, b"HTTP/1.1 200"),
        (GET + b"\r\n", b"HTTP/1.1 200"),
        (POST, b"HTTP/1.1 401"),
    ],
    ids=["nothing", "half a head", "one request", "and an empty line", "a body nobody reads"],
)
async def test_who_sends_nothing_more_is_let_go(sent: bytes, answered: bytes) -> None:
    async with serving(SHORT) as server:
        reader, writer = await connect(server)
        writer.write(sent)
        answer = await until_closed(reader)
        writer.close()
    assert answer.startswith(answered) and answer.count(b"HTTP/1.1") == (answered != b"")


@pytest.mark.parametrize("closing", [b"HTTP/1.1\r\nConnection: close", b"HTTP/1.0"])
async def test_a_reply_before_the_body_has_arrived_reaches_who_asked_to_close(
    closing: bytes,
) -> None:
    """Closing at once would reset the connection, and the client reads the reset alone."""
    sent = POST.replace(b"HTTP/1.1", closing) + bytes(5_000_000)
    async with serving(ConnectionLimits()) as server:
        for rest in (bytes(5_000_000), bytes(10), b""):
            reader, writer = await connect(server)
            writer.write(sent)
            with suppress(ConnectionError):
                await writer.drain()
            writer.write(rest)
            assert (await until_closed(reader)).startswith(b"HTTP/1.1 401"), len(rest)
            writer.close()


async def test_a_byte_now_and_then_keeps_no_connection() -> None:
    async with serving(SHORT) as server:
        reader, writer = await connect(server)
        started = time.monotonic()
        answer = asyncio.create_task(until_closed(reader))
        for byte in b"GET /quick HTTP/1.1\r\nHost: " + b"x" * 100:
            writer.write(bytes([byte]))
            if (await asyncio.wait({answer}, timeout=0.05))[0]:
                break
        assert (await answer).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 4
        writer.close()


async def test_the_longest_idle_make_room_and_requests_under_way_do_not() -> None:
    async with serving(ConnectionLimits(max_connections=8)) as server:
        reader, writer = await connect(server)
        writer.write(GET.replace(b"quick", b"slow"))
        await asyncio.sleep(0.1)  # until it is under way
        idle = [await connect(server) for _ in range(40)]
        assert b"quick" in await asked(server)
        assert await until_closed(idle[0][0]) == b""
        assert len(server._server.server_state.connections) <= 8
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, other in [*idle, (reader, writer)]:
            other.close()


async def test_who_reads_nothing_is_cut_off_and_its_request_cancelled(tmp_path: Path) -> None:
    """A stream stands still while nobody reads it, but not for ever: its node works for others."""
    step = GenerateOutput(token_ids=(2**31 - 1,) * 2000)  # many bytes for little work
    generator = ScriptedGenerator([step] * 100_000)
    app = create_app(
        generator, tiny_serving(tiny_tokenizer(tmp_path)), metrics_registry=CollectorRegistry()
    )
    body = b'{"prompt": [5], "stream": true, "return_token_ids": true, "detokenize": false}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    limits = ConnectionLimits(send_timeout_s=0.4)
    async with running(app, limits) as server, asyncio.timeout(20):
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connections = server._server.server_state.connections
            while connections or not generator.cancelled:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
            assert generator.open == 0
            # What the kernel has is no whole reply, and does not look like one.
            left = b"".join(iter(lambda: received(reader), b""))
            assert b"[DONE]" not in left and not left.endswith(b"0\r\n\r\n")
            assert len(left) < 2**26


async def test_what_nobody_reads_is_bounded_for_all_readers_together() -> None:
    """The largest reply goes first; those that are small, or read, stay."""

    async def reply(request: Request) -> Response:
        return Response(bytes(int(request.query_params["size"])))

    limits = ConnectionLimits(max_unread_bytes=2**25, max_unread_bytes_in_all=2**24)
    app = Starlette(routes=[Route("/", reply)])
    async with running(app, limits) as server, asyncio.timeout(20):
        readers = []
        for megabytes in (14, 16, 1):
            readers.append(reader := socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(f"GET /?size={megabytes}000000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        connections = server._server.server_state.connections
        while len(connections) != 2:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        left = sorted(it.num_unread for it in connections if isinstance(it, Connection))
        assert left[0] == 0 and 5 * 10**6 < left[1] < 14 * 10**6
        for reader in readers:
            reader.close()


def received(reader: socket.socket) -> bytes:
    """The bytes that come next; none at the end, or once the server has broken the connection."""
    try:
        return reader.recv(2**20)
    except ConnectionError:
        return b""


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(SHORT) as server:
        reader, writer = await connect(server)
        writer.write(GET.replace(b"quick", b"slow") + GET + GET[:20])
        answer = await until_closed(reader)
        writer.close()
    assert answer.index(b"slow") < answer.index(b"quick")


async def test_what_is_no_http_is_told_so_in_json() -> None:
    async with serving(ConnectionLimits()) as server:
        for sent, status in MALFORMED.items():
            head, _, body = (await asked(server, sent)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), (sent[:60], head)
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == (status, "invalid_request_error")


async def test_endless_trailers_are_refused() -> None:
    head = b"POST /quick HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(ConnectionLimits()) as server:
        chunks = b"1\r\na\r\n" * 50_000
        assert b"quick" in await asked(server, head + chunks + b"0\r\n\r\n")
        answer = await asked(server, head + b"1\r\na\r\n0\r\n" + b"A: " + b"a" * 1_000_000)
    assert answer.startswith(b"HTTP/1.1 431")


def requests_on_one_connection(offer: bytes) -> bytes:
    """Requests of every framing, each with `offer` in its headers, and then one without it."""
    post = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + offer
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
    return b"".join(
        [
            post + b"Content-Length: 11\r\n\r\nGET / HTTP/\r",
            b"GET /echo?a=b HTTP/1.1\r\n" + offer + b"Host: x\r\n\r\n",
            chunked + b"3;x=y\r\nabc\r\nA\r\n0\r\n\r\n01234\r\n0\r\nTrailer: t\r\n\r\n",
            post + b"Content-Length: 0\r\n\r\n",
            post + b"\r\n",
            b"GET /echo HTTP/1.1\r\nHost: last\r\nConnection: close\r\n\r\n",
        ]
    )


async def answers_to(server: HttpServer, pieces: list[bytes]) -> bytes:
    """All that comes for `pieces` sent one by one, without its dates."""
    reader, writer = await connect(server)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0)
    answers = await until_closed(reader)
    writer.close()
    return re.sub(rb"date: [^\r]*\r\n", b"", answers)


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "tls"])
async def test_an_offered_upgrade_changes_nothing(offer: bytes) -> None:
    """The same requests without the offer are the oracle, wherever a packet ends."""
    sent = requests_on_one_connection(offer)
    ends = [match.end() for match in re.finditer(b"\r\n\r\n", sent)]
    cuts = [end + by for end in ends for by in (-3, -1, 0, 1)]
    async with serving(ConnectionLimits()) as server:
        right = await answers_to(server, [requests_on_one_connection(b"")])
        assert right.count(b"HTTP/1.1 200") == 6
        for cut in cuts:
            assert await answers_to(server, [sent[:cut], sent[cut:]]) == right
        assert await answers_to(server, [bytes([byte]) for byte in sent]) == right


async def test_garbage_after_an_offered_upgrade_is_refused() -> None:
    head = b"POST /quick HTTP/1.1\r\nHost: x\r\n" + OFFERS[0]
    chunks = b"Transfer-Encoding: chunked\r\n"
    hostile = {
        chunks + b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": 400,
        chunks + b"\r\n1\r\nab" + b"x" * 100_000: 400,
        chunks + b"Content-Length: 5\r\n\r\n0\r\n\r\n": 400,
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef": 400,
        chunks + b"\r\n1;" + b"x" * 100_000: 431,
        chunks + b"\r\n0\r\n" + b"A: a\r\n" * 20_000: 431,
    }
    async with serving(ConnectionLimits()) as server:
        for sent, status in hostile.items():
            answer = await answers_to(server, [head + sent])
            assert answer.startswith(b"HTTP/1.1 %d " % status), sent[:60]
        # Each of many offers in few packets costs a parser, and no copy of what follows it.
        many = GET.replace(b"x\r\n", b"x\r\n" + OFFERS[0]) * 500
        assert (await answers_to(server, [many + POST])).count(b"quick") == 500


HALF_CLOSING = (
    b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx",
    b"GET /slow HTTP/1.0\r\n\r\n",
    GET.replace(b"quick", b"slow") + GET + GET[:20],
)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_sends_no_more_gets_the_whole_reply(loop: Callable[[], Any]) -> None:
    async def ask() -> None:
        async with serving(ConnectionLimits()) as server:
            for sent in HALF_CLOSING:
                reader, writer = await connect(server)
                writer.write(sent)
                writer.write_eof()
                answer = await until_closed(reader)
                writer.close()
                assert answer.count(b"HTTP/1.1 200") == 1 + sent.count(GET)
                assert b"slow" in answer
                # An interim reply, at most once, and only where HTTP has one.
                assert answer.count(b"100 Continue") <= (b"HTTP/1.0" not in sent)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ask())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_who_closes_is_cancelled_though_it_may_look_as_if_it_waited(
    tmp_path: Path, stream: bytes, loop: Callable[[], Any]
) -> None:
    generator = ScriptedGenerator([], endless=True)

    async def leave() -> None:
        app = create_app(
            generator, tiny_serving(tiny_tokenizer(tmp_path)), metrics_registry=CollectorRegistry()
        )
        body = b'{"prompt": [5], "stream": %s}' % stream
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        async with running(app, ConnectionLimits()) as server, asyncio.timeout(10):
            _, writer = await connect(server)
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while not generator.open:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
            writer.close()
            while generator.open:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
            assert not server._server.server_state.connections

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(leave())
    assert generator.cancelled == 1


async def test_an_idle_connection_is_kept_as_long_as_the_option_says() -> None:
    assert NodeConfig().timeout_keep_alive >= 95
    for seconds, answers in ((0.2, 1), (5.0, 2)):
        async with serving(ConnectionLimits(keep_alive_timeout_s=seconds)) as server:
            reader, writer = await connect(server)
            writer.write(GET)
            await asyncio.sleep(0.8)
            writer.write(GET.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            assert (await until_closed(reader)).count(b"200 OK") == answers
            writer.close()
