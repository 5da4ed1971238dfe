"""Bodies of all requests together: bounded in bytes and time, and small ones never wait."""

import asyncio
import gzip
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.http.callers import Terms, remember
from serving.http.errors import ERROR_HANDLERS
from serving.http.request_bodies import PIECE_BYTES, BodyLimits, RequestBodies, Unpacker
from serving.http.server import HttpServer

SMALL, LARGE = b"s" * 100, b"l" * 100_000
JSON = {"Content-Type": "application/json"}


@dataclass(slots=True, frozen=True)
class Someone:
    """A caller of whom only the tenant counts."""

    tenant: str
    name: str = "someone"
    is_operator: bool = False
    terms: Terms = field(default_factory=Terms)

    def entering(self) -> AbstractContextManager[None]:
        return nullcontext()

    def headers(self) -> Mapping[str, str]:
        return {}


@dataclass(slots=True)
class Workplace:
    """A server whose work on large bodies ends when the test says so."""

    url: str = ""
    at_work: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)

    def work(self, body: bytes) -> int:
        self.at_work += 1
        if len(body) > len(SMALL):
            assert self.go_on.wait(20)
        self.at_work -= 1
        return len(body)

    async def post(self, body: bytes, coding: str) -> tuple[int, str]:
        """Status and text of the reply to a body that is compressed already."""
        headers = JSON | {"Content-Encoding": coding}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url, data=body, headers=headers) as reply,
        ):
            return reply.status, await reply.text()

    async def send(self, body: bytes, tenant: str = "") -> tuple[int, str | None]:
        """Status and Retry-After."""
        headers = JSON | {"X-Tenant": tenant}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url, data=body, headers=headers) as reply,
        ):
            return reply.status, reply.headers.get("Retry-After")

    async def send_half(self, size: int, tenant: str = "") -> asyncio.StreamWriter:
        """A connection that sends all of its body but one byte."""
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = "POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"X-Tenant: {tenant}\r\n"
        writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + b"x" * (size - 1))
        await writer.drain()
        await asyncio.sleep(0.2)  # until it has arrived
        return writer


@asynccontextmanager
async def place_with(**limits: float) -> AsyncIterator[Workplace]:
    place, bodies = Workplace(), RequestBodies(BodyLimits(**limits))  # type: ignore[arg-type]

    async def answer(request: Request) -> Response:
        remember(request.scope, Someone(request.headers.get("x-tenant", "")))
        size = await bodies.process(request.scope, request.receive, place.work, max_bytes=1_000_000)
        return Response(str(size))

    app = Starlette(
        routes=[Route("/", answer, methods=["POST"])], exception_handlers=ERROR_HANDLERS
    )
    server = HttpServer(app, "127.0.0.1", 0, drain_timeout_s=1)
    await server.start()
    place.url = f"http://127.0.0.1:{server.port}"
    try:
        yield place
    finally:
        place.go_on.set()
        await server.close()


async def until_at_work(place: Workplace, number: int) -> None:
    async with asyncio.timeout(10):
        while place.at_work != number:  # noqa: ASYNC110 - a thread tells no event
            await asyncio.sleep(0.01)


async def test_large_bodies_take_turns_and_small_ones_pass_them() -> None:
    async with place_with(wait_timeout_s=0.5) as place:
        first = asyncio.create_task(place.send(LARGE))
        await until_at_work(place, 1)
        assert await place.send(SMALL) == (200, None)
        assert await place.send(LARGE) == (503, "5")
        place.go_on.set()
        assert await first == (200, None)
        assert await place.send(LARGE) == (200, None)


async def test_tenants_take_turns_with_large_bodies() -> None:
    """However many of another's came first."""
    served: list[str] = []

    async def ask(place: Workplace, tenant: str) -> None:
        assert await place.send(LARGE, tenant) == (200, None)
        served.append(tenant)

    async with place_with() as place:
        flood = [asyncio.create_task(ask(place, "bob")) for _ in range(20)]
        await until_at_work(place, 1)
        await asyncio.sleep(0.3)  # until all of them wait
        guest = asyncio.create_task(ask(place, "alice"))
        await asyncio.sleep(0.1)
        place.go_on.set()
        await asyncio.gather(guest, *flood)
    assert served.index("alice") <= 2, served


async def test_no_tenant_takes_all_of_the_memory_for_bodies() -> None:
    async with place_with(max_bytes_in_flight=130_000, body_timeout_s=1.5) as place:
        place.go_on.set()
        large = [await place.send_half(len(LARGE), "bob") for _ in range(2)]
        assert await place.send(LARGE, "bob") == (429, "1")
        assert await place.send(LARGE, "alice") == (200, None)
        for writer in large:
            writer.close()


async def test_a_client_that_leaves_gives_its_turn_back_when_its_thread_ends() -> None:
    async with place_with(wait_timeout_s=0.5) as place:
        first = asyncio.create_task(place.send(LARGE))
        await until_at_work(place, 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await place.send(LARGE) == (503, "5")
        place.go_on.set()
        await until_at_work(place, 0)
        assert await place.send(LARGE) == (200, None)


async def test_bytes_under_way_are_bounded_and_come_back() -> None:
    async with place_with(max_bytes_in_flight=50_000, body_timeout_s=1.5) as place:
        place.go_on.set()
        stalled = await place.send_half(len(LARGE))
        assert await place.send(LARGE) == (429, "1")
        assert await place.send(SMALL) == (200, None)
        await asyncio.sleep(1.5)  # until the stalled one is given up
        assert await place.send(LARGE) == (200, None)
        stalled.close()


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_is_refused_by_its_length_whether_declared_or_not(declared: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield LARGE

    async with place_with() as place, aiohttp.ClientSession() as session:
        data = LARGE * 30 if declared else chunks()
        async with session.post(place.url, data=data, headers=JSON) as reply:
            assert reply.status == 413
            assert (await reply.json())["error"]["code"] == 413
        assert place.at_work == 0


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "DEFLATE": zlib.compress,
    "deflate": bare_deflate,
    "identity": bytes,
}


async def test_compressed_bodies_are_read() -> None:
    async with place_with() as place:
        place.go_on.set()
        for size in (0, 1, 100, 300_000, 1_000_000):
            for coding, pack in PACKERS.items():
                answer = await place.post(pack(b"a" * size), coding)
                assert answer == (200, str(size)), coding


async def test_gzip_bodies_may_have_many_members() -> None:
    """As parallel programs write them; members of nothing are bounded by what arrives."""
    members = b"".join(map(gzip.compress, (b"", b"a" * 300_000, b"", b"b", b"c" * 5000, b"")))
    async with place_with() as place:
        place.go_on.set()
        assert await place.post(members, "gzip") == (200, "305001")
        assert await place.post(gzip.compress(b"") * 10_000, "gzip") == (200, "0")
        status, _ = await place.post(gzip.compress(b"") * 60_000, "gzip")
        assert status == 413  # by the 1,200,000 bytes that arrive


@pytest.mark.parametrize("size", [1, 7, 4096, 100_000])
def test_unpacking_does_not_depend_on_where_packets_end(size: int) -> None:
    text = random.Random(0).randbytes(9000) + bytes(800_000)
    packed = gzip.compress(text) + gzip.compress(b"") + gzip.compress(text)
    unpacker, found = Unpacker("gzip"), []
    for at in range(0, len(packed), size):
        piece = unpacker.piece(packed[at : at + size])
        while piece:
            assert len(piece) <= PIECE_BYTES
            found.append(piece)
            piece = unpacker.piece(b"")
    unpacker.finish()
    assert b"".join(found) == text * 2


async def test_what_cannot_be_unpacked_is_told_so() -> None:
    whole = gzip.compress(b"abc" * 1000)
    wrong = {
        ("gzip", b""): (400, "the gzip body is cut off"),
        ("gzip", whole[:1]): (400, "the gzip body is cut off"),
        ("gzip", whole[:-1]): (400, "the gzip body is cut off"),
        ("gzip", whole + b"x"): (400, "the gzip body is cut off"),
        ("gzip", whole + whole[:20]): (400, "the gzip body is cut off"),
        ("gzip", whole + bytes(8)): (400, "the gzip body is damaged"),
        ("deflate", zlib.compress(b"a") * 2): (400, "more bytes follow the end of the deflate"),
        ("deflate", bare_deflate(b"a") + b"x"): (400, "more bytes follow the end of the deflate"),
        ("gzip", b"{}" * 100): (400, "the gzip body is damaged"),
        ("deflate", whole): (400, "the deflate body is damaged"),
        ("br", whole): (415, "Content-Encoding 'br' is not read here: send one of gzip, deflate"),
        ("zstd", whole): (415, "Content-Encoding 'zstd' is not read here"),
        ("gzip, gzip", gzip.compress(whole)): (415, "Content-Encoding 'gzip, gzip' is not read"),
    }
    async with place_with() as place:
        for (coding, body), (status, words) in wrong.items():
            answer = await place.post(body, coding)
            assert answer[0] == status and words in answer[1], (coding, body[:20], answer)
        assert place.at_work == 0


async def test_a_small_body_that_unpacks_to_much_is_refused_on_the_way() -> None:
    """Unpacked bytes count, for the request and for all of them, and it is given back."""
    zeros = zlib.compressobj(9, wbits=31)
    bomb = b"".join(zeros.compress(bytes(2**20)) for _ in range(100))  # 100 KB of 100 MB
    async with place_with(max_bytes_in_flight=1_200_000) as place:
        place.go_on.set()
        for _ in range(3):
            status, text = await place.post(bomb, "gzip")
            assert status == 413 and "larger than 1000000 bytes when unpacked" in text
        assert await place.post(gzip.compress(b"a" * 1_000_000), "gzip") == (200, "1000000")
    async with place_with(max_bytes_in_flight=500_000) as place:
        assert (await place.post(gzip.compress(bytes(900_000)), "gzip"))[0] == 429
