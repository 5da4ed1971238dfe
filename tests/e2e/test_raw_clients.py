"""Clients that offer upgrades, half-close, compress or sit idle: a proxy and a node serve them."""

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.nodes.asking import COMPLETIONS, ask, question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import API_KEY, SECRETS, Launcher, ServedCluster, ServerProcess

PROMPT = list(prompt_of(70, salt=3))
# What the client of the JDK sends before it knows whether the server speaks HTTP/2.
OFFER = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
)
IDLE_S = 95


def request_of(body: bytes, headers: str = "") -> bytes:
    """A request for a completion as its bytes."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
    framing = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + headers + framing).encode() + body


@asynccontextmanager
async def connection(
    server: ServerProcess,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(IDLE_S + 60):
        yield reader, writer
    writer.close()


def ids_in(answers: bytes) -> list[list[int]]:
    """Token ids of all choices that bring some, whole or in events."""
    return [json.loads(found) for found in re.findall(rb'"token_ids":(\[[\d,]+\])', answers)]


@pytest.mark.parametrize("name", ["proxy", "d"])
async def test_offers_half_closes_and_packed_bodies_change_no_answer(
    served: ServedCluster, name: str
) -> None:
    server: ServerProcess = getattr(served, name)
    right = (await ask(server.url, question(PROMPT))).token_ids
    whole, streamed = (json.dumps(question(PROMPT, stream=it)).encode() for it in (False, True))
    # Two offers in a row, cut within the offer, and a client that sends no more after them.
    sent = request_of(whole, OFFER) + request_of(streamed, OFFER)
    async with connection(server) as (reader, writer):
        writer.write(sent[:150])
        await asyncio.sleep(0.05)
        writer.write(sent[150:])
        writer.write_eof()
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 2 and b"data: [DONE]" in answers
    first, *rest = ids_in(answers)
    assert first == right
    assert [token for ids in rest for token in ids] == right
    packed = {"gzip": gzip.compress(whole), "deflate": zlib.compress(whole)}
    for coding, body in packed.items():
        async with connection(server) as (reader, writer):
            writer.write(request_of(body, f"Content-Encoding: {coding}\r\n"))
            writer.write_eof()
            assert ids_in(await reader.read()) == [right]


@pytest.mark.long
async def test_a_connection_that_was_idle_for_95_s_is_served(served: ServedCluster) -> None:
    """Go's clients keep one for 90 s: whoever closes earlier loses requests that are on the way."""
    body = json.dumps(question(PROMPT)).encode()
    async with (
        connection(served.proxy) as (from_proxy, to_proxy),
        connection(served.d) as (from_d, to_d),
    ):
        for writer in (to_proxy, to_d):
            writer.write(request_of(body))
        await asyncio.sleep(IDLE_S)
        for writer in (to_proxy, to_d):
            writer.write(request_of(body, "Connection: close\r\n"))
        for reader in (from_proxy, from_d):
            first, second = ids_in(await reader.read())
            assert first == second


@pytest.mark.long
async def test_comments_of_a_silent_stream_change_none_of_its_events(real: Launcher) -> None:
    often = (*SECRETS, "--sse-keep-alive-interval", "0.001")
    p, d = real.node("prefill_node", *often), real.node("decode_node", *often)
    proxy = real.proxy(p, d, *often)
    proxy.wait_for("tandem_proxy_available_nodes", 2)
    for server in (proxy, d):
        right = (await ask(server.url, question(PROMPT, max_tokens=50))).token_ids
        async with connection(server) as (reader, writer):
            writer.write(
                request_of(json.dumps(question(PROMPT, max_tokens=50, stream=True)).encode())
            )
            writer.write_eof()
            answer = await reader.read()
        assert b": keep-alive\n\n" in answer
        assert [token for ids in ids_in(answer) for token in ids] == right
    for server in (p, d, proxy):
        server.assert_at_rest()
