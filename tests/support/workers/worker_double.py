"""The base of doubles of other engines' workers: a port, scripted faults, records.

A double follows its engine's contract, and writes down whoever breaks it.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.api.api_double import write_model_folder

VOCAB_SIZE = 300
MODEL = "tiny"
OWN_WORDS = "the worker's own words"
BEFORE_HEADERS = -1
APART_S = 0.01
"""Between tokens and a fault, so that they do not arrive as one."""


Page = Callable[[web.Request], Awaitable[web.Response]]


def next_token(tokens: Sequence[int]) -> int:
    """The token after these; it can be told from the last one, so that answers can go on."""
    return 70 + (7 * len(tokens) + 5 * tokens[-1] + tokens[0]) % 26


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that every double answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def write_foreign_model(folder: Path) -> str:
    """A model folder as such a worker names it: a tokenizer and config.json."""
    write_model_folder(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return str(folder)


@dataclass(slots=True)
class Fault:
    """A request goes wrong after `at` tokens, or before its headers.

    `status`: with this answer, before anything else. `kind`: it hangs, its connection breaks, or
    an event tells an error, or one of `events` has come and it ends.
    """

    kind: str = "hang"
    at: int = 0
    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    events: tuple[bytes, ...] = ()
    times: int = 10**9


@dataclass(slots=True, eq=False)
class Asked:
    """One request. `end`: "ok", "cut" by the other side, "broken" by the double, or "aborted".

    `port` is that of whoever asks: another one for each connection.
    """

    headers: Mapping[str, str]
    body: dict[str, Any]
    port: int
    end: str = ""
    num_sent: int = 0

    @property
    def request_id(self) -> str:
        return self.headers.get("X-Request-Id", "")

    @property
    def is_canary(self) -> bool:
        return self.request_id.startswith("canary-")


class BrokenOff(Exception):
    """The double breaks its connection here."""


@dataclass(slots=True, eq=False)
class WorkerDouble:
    """One worker. `violations`: breaches of the contract by whoever asks it."""

    kind: str
    fault: Fault | None = None
    health: int = 200
    life: int = 1
    num_cached: int = 0
    eos_length: int | None = None
    moves_keys: bool = True
    model: str = MODEL
    asked: list[Asked] = field(default_factory=list)
    open: set[Asked] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    reset: int = 0
    page: bytes | None = None
    port: int = 0
    _runner: web.AppRunner | None = None

    backend = ""
    path = ""

    @property
    def url(self) -> str:
        return f"{self.backend}+http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[Asked]:
        """Requests of clients, without canaries."""
        return [it for it in self.asked if not it.is_canary]

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post(self.path, self._serve)
        for path, handle in self.pages().items():
            app.router.add_route("*", path, self._page(handle))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def pages(self) -> dict[str, Page]:
        raise NotImplementedError

    async def answer(self, asked: Asked, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    def error_body(self, message: str, status: int) -> bytes:
        raise NotImplementedError

    def expect(self, holds: bool, words: str) -> None:
        if not holds:
            self.violations.append(f"{self.kind}: {words}")

    def _page(self, handle: Page) -> Page:
        """A page, or `page` instead of each."""

        async def show(request: web.Request) -> web.Response:
            if self.page is not None:
                return web.Response(body=self.page)
            return await handle(request)

        return show

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        _, port = request.transport.get_extra_info("peername")
        asked = Asked(request.headers.copy(), json.loads(await request.read()), port)
        self.asked.append(asked)
        self.open.add(asked)
        self.expect(bool(asked.request_id), "there is an X-Request-Id")
        try:
            if not asked.is_canary and (fault := self._fault_at(BEFORE_HEADERS)) is not None:
                if fault.status:
                    body = fault.body or self.error_body(OWN_WORDS, fault.status)
                    return web.Response(status=fault.status, body=body, headers=fault.headers)
                await self._fail(fault)
            reply = await self.answer(asked, request)
            asked.end = asked.end or "ok"
            return reply
        except asyncio.CancelledError:
            asked.end = "cut"
            raise
        except (BrokenOff, ConnectionError):
            asked.end = "broken"
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self.open.discard(asked)

    async def stream(
        self, asked: Asked, request: web.Request, events: AsyncGenerator[tuple[int, bytes], None]
    ) -> web.StreamResponse:
        """Sends events, each with the number of tokens so far, unless a fault comes first."""
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        if await self._goes_wrong(asked, reply):
            return reply
        async for num_sent, event in events:
            await reply.write(b"data: " + event + b"\n\n")
            asked.num_sent = num_sent
            if await self._goes_wrong(asked, reply):
                return reply
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _goes_wrong(self, asked: Asked, reply: web.StreamResponse) -> bool:
        """True where a scripted fault has ended the answer."""
        if asked.is_canary or (fault := self._fault_at(asked.num_sent)) is None:
            return False
        await asyncio.sleep(APART_S)
        for event in fault.events:
            await reply.write(event)
        if fault.kind == "error":
            body = self.error_body(OWN_WORDS, fault.status or 500)
            await reply.write(b"data: " + body + b"\n\ndata: [DONE]\n\n")
        elif fault.kind != "end":
            await self._fail(fault)
        return True

    def _fault_at(self, at: int) -> Fault | None:
        fault = self.fault
        if fault is None or not fault.times:
            return None
        is_now = at == BEFORE_HEADERS if fault.status and fault.kind == "hang" else at == fault.at
        if is_now:
            fault.times -= 1
        return fault if is_now else None

    async def _fail(self, fault: Fault) -> None:
        if fault.kind == "break":
            raise BrokenOff
        await asyncio.Event().wait()


def json_reply(body: object, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


@asynccontextmanager
async def running_workers(*workers: WorkerDouble) -> AsyncIterator[None]:
    """Started workers. In the end no request is open, and no contract was broken."""
    try:
        for worker in workers:
            await worker.start()
        yield
        async with asyncio.timeout(5.0):
            while any(worker.open for worker in workers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        for worker in workers:
            await worker.close()
    assert [it for worker in workers for it in worker.violations] == []
