"""The load core of the benchmarks against a real cluster, and targets that it must refuse."""

from collections.abc import AsyncIterator
from time import monotonic

import msgspec
import pytest
from aiohttp import web

from benchmarks.load.agreement import Expected, Reference, with_margins
from benchmarks.load.client import Client, TargetError
from benchmarks.load.loop import Pace, drive
from benchmarks.load.request import GREEDY, Request
from benchmarks.load.summary import Summary
from tests.support.api.node_double import client_of
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import API_KEY, ServedCluster

IDS = {**GREEDY, "return_token_ids": True}
TEXT = Request(prompt="the quick brown fox jumps", max_tokens=12)
CHAT = Request(messages=({"role": "user", "content": "stop here now"},), max_tokens=9)
TOKENS = Request(prompt=prompt_of(70, salt=9), max_tokens=12, sampling=IDS)
LOAD = [TEXT, CHAT, TOKENS] * 3


@pytest.fixture
async def client(served: ServedCluster) -> AsyncIterator[Client]:
    async with Client(served.proxy.url, "tiny", api_key=API_KEY) as made:
        yield made


async def test_a_reply_is_what_the_openai_client_gets(
    served: ServedCluster, client: Client
) -> None:
    reply = await client.send(TOKENS)
    async with client_of(served.proxy.url, API_KEY) as theirs:
        whole = await theirs.completions.create(
            model="tiny",
            prompt=list(prompt_of(70, salt=9)),
            max_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    assert reply.error == "" and reply.finish_reason == "length"
    assert reply.text == whole.choices[0].text
    assert list(reply.token_ids) == (whole.choices[0].model_extra or {})["token_ids"]
    assert (reply.prompt_tokens, reply.output_tokens) == (70, 12)
    assert len(reply.chunks) <= 12 and reply.sent < reply.chunks[0] <= reply.ended
    assert list(reply.chunks) == sorted(reply.chunks)


async def test_a_load_of_all_forms_agrees_with_one_node(
    served: ServedCluster, client: Client
) -> None:
    await client.check(TEXT)
    run = await drive(client.send, LOAD, Pace(at_once=3))
    async with Client(served.d.url, "tiny", api_key=API_KEY) as alone:
        reference = Reference()
        await reference.ask(alone, LOAD, ends_at=monotonic() + 60)
        first = await alone.send(with_margins(CHAT))
    agreement = reference.judge(run)
    assert agreement.holds and agreement.compared == len(LOAD)
    assert len(Expected.of(first).margins) == CHAT.max_tokens
    summary = Summary.of(run)
    assert (summary.completed, summary.failed) == (9, 0)
    assert summary.output_tokens == 3 * (12 + 9 + 12)
    # Each answer one request late: everything differs.
    late = msgspec.structs.replace(run, replies=(*run.replies[1:], run.replies[0]))
    assert reference.judge(late).equal == 0


async def test_a_dead_target_a_wrong_model_and_no_base_url_are_named(
    served: ServedCluster, client: Client
) -> None:
    async with Client("http://127.0.0.1:9", "tiny") as dead:
        with pytest.raises(TargetError, match=r"127\.0\.0\.1:9/v1/models does not answer"):
            await dead.check(TEXT)
    async with Client(served.proxy.url, "other", api_key=API_KEY) as wrong:
        with pytest.raises(TargetError, match="does not serve 'other': --model may be tiny"):
            await wrong.check(TEXT)
    async with Client(f"{served.proxy.url}/nowhere", "tiny", api_key=API_KEY) as nowhere:
        with pytest.raises(TargetError, match="is this the base URL"):
            await nowhere.check(TEXT)
    reply = await client.send(Request(prompt="a", max_tokens=1, sampling={"temperature": -1}))
    assert "HTTP 400" in reply.error and "temperature" in reply.error


STREAMS = {
    "usage": ['{"choices": [{"text": "a", "finish_reason": "length"}]}', "[DONE]"],
    "ended": ['{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}'],
    "broke": ['{"error": {"message": "it broke", "code": 500}}'],
    "decode": ["{"],
}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("usage", "streams no usage: its server must answer"),
        ("ended", "the stream ended before the answer did"),
        ("broke", "it broke"),
        ("decode", "DecodeError"),
    ],
)
async def test_a_target_with_a_bad_stream_is_refused(kind: str, problem: str) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def complete(_: web.Request) -> web.Response:
        body = "".join(f"data: {event}\n\n" for event in STREAMS[kind])
        return web.Response(text=body, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with Client(f"http://127.0.0.1:{port}/v1", "tiny") as client:
            with pytest.raises(TargetError, match=problem):
                await client.check(TEXT)
    finally:
        await runner.cleanup()
